"""The parts of answers.py."""
