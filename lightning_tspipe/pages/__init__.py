"""Pages for a browser, each one file that loads nothing: a timeline to zoom, a report of a run."""
