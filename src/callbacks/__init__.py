"""Lightning callbacks that measure and show; each works in any Lightning project."""
