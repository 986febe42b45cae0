"""Runtime: transports, stages, and the executor that runs schedules on them."""
