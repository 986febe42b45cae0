"""Parameters and buffers: who owns which, versions, averages and predictions."""
