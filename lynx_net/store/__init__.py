"""A store of encoded caches, by the tokens they belong to (docs/store.md)."""

from lynx_net.store.messages import is_already_stored, is_not_stored, stored_as, wanted
from lynx_net.store.server import StoreOptions, serve_store
from lynx_net.store.storage import LocalStorage, Storage
from lynx_net.store.store import ContextStore, EntryInfo
from lynx_net.store.tokens import TokenPath

__all__ = [
    "ContextStore",
    "EntryInfo",
    "LocalStorage",
    "Storage",
    "StoreOptions",
    "TokenPath",
    "is_already_stored",
    "is_not_stored",
    "serve_store",
    "stored_as",
    "wanted",
]
