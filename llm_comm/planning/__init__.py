"""Which algorithm serves a message, and how it is launched: tuning tables, and what they say for a size. No torch here.

``tables``: rows and tables. ``table_files``: their files.
``installed``: the user's directory of them. ``catalogue``: the table for a device, by the core's choice. ``plan``: what
is asked, and the answer. ``selection``: from a table to a plan. ``multicast``: algorithms by the NVLink switch.
``planner``: the plans of one communicator.
"""
