"""A module for each verb, with its click command named `command`."""
