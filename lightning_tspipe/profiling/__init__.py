"""What networks and steps cost, measured on a device or calculated for one that is not here."""
