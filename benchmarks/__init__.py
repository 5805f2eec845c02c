"""What a lock costs, as ratios against a peer of the same run: absolute times tell about the machine.

Each topic runs in a process of its own, with servers of its own.
"""
