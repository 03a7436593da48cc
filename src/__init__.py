"""batchscope: train a small zoo of networks with one command, and see what every step cost and why.

Importing the package is cheap: torch and Lightning are imported by the modules that need them.
"""

__version__ = "0.1.0"
