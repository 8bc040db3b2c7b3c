"""The import path of the router that Serve is given.

Serve pickles the classes of the module that it is told, and all of their globals; a class that is only named here goes
by reference.
"""

from relaygr.cluster.ray.slot_router import SlotRouter

__all__ = ["SlotRouter"]
