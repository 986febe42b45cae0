"""From options and a first batch to stages in their places."""
