"""Planning: which algorithm serves a message and how it is launched, by tuning tables. This package does not use torch.

``tables``: rows and tables. ``catalogue``: table files, and the table for a device, both by the core. ``plan``: the
question and the answer. ``selection``: from a table to a plan. ``multicast``: algorithms that use the NVLink switch.
``planner``: the plans of one communicator.
"""
