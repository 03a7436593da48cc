"""The YAML files beside this one are every choice a user can make; this file lets a wheel carry them."""
