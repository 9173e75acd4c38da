"""Compiler: from a program for a world to one kernel for all its ranks and message sizes."""
