"""The operations of a communicator, a file each, and the torch operators that compiled models call."""
