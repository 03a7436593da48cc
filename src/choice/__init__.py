"""What a training step would take on another device, and which device to take. Imports no torch."""
