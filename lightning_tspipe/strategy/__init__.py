"""The strategy: the bridge between Lightning's hooks and the runtime."""
