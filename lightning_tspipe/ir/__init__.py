"""The schedule language: actions, who runs them, what each waits for. Pure Python."""
