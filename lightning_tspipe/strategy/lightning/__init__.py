"""Lightning itself: its two namespaces, launchers and processes."""
