"""Pages, prefixes, leases, tiers and the expander: bookkeeping without I/O. Nothing here touches page contents."""

from relaygr.cache.expander import Option, Source, choose
from relaygr.cache.held import HeldColumns
from relaygr.cache.lease import Lease
from relaygr.cache.pages import Leased, PagePool, Pages
from relaygr.cache.prefix import Identity, Lineage, Prefix
from relaygr.cache.return_times import ReturnTimes
from relaygr.cache.tier import PARTS, Tier
from relaygr.cache.write_back import ReturnRate, WriteBackQueue

__all__ = [
    "PARTS",
    "HeldColumns",
    "Identity",
    "Lease",
    "Leased",
    "Lineage",
    "Option",
    "PagePool",
    "Pages",
    "Prefix",
    "ReturnRate",
    "ReturnTimes",
    "Source",
    "Tier",
    "WriteBackQueue",
    "choose",
]
