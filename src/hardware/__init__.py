"""What a device can do (calibration), is doing (telemetry), and must do (FLOPs)."""
