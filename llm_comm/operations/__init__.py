"""Operations of a communicator, one file each, and the torch operators that compiled models call."""
