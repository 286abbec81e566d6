"""The worker: the process that holds the devices and trains."""
