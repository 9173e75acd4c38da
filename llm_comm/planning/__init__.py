"""Which algorithm serves a message, and how it is launched: tuning tables, and what they say for a size. No torch here.

``tables``: rows and tables. ``catalogue``: their files, and the table for a device, by the core. ``plan``: what is
asked, and the answer. ``selection``: from a table to a plan. ``multicast``: algorithms by the NVLink switch.
``planner``: the plans of one communicator.
"""
