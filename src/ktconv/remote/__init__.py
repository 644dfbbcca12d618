"""Sources that are read over a network while they are converted: the hub, object stores, https."""

from ktconv.remote.mirror import open_remote as open_remote
from ktconv.remote.mirror import pinned as pinned
from ktconv.remote.urls import is_url as is_url
from ktconv.system.elsewhere import transfer as transfer
