"""One file an event kind; each has one function ``handle(world, argument)``."""
