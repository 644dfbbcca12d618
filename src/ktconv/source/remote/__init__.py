"""Sources that are read over a network while they are converted: the hub, object stores, https."""

from ktconv.source.remote.mirror import open_remote as open_remote
from ktconv.source.remote.mirror import pinned as pinned
from ktconv.source.remote.urls import is_url as is_url
from ktconv.system.stores import transfer as transfer
