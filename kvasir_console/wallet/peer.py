"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from kvasir_console.errors import WalletError

_UCRED = struct.Struct("3i")  # pid, uid, gid (unix(7))


def check_same_user(writer: asyncio.StreamWriter) -> None:
    """Refuse a peer of another user, root included. Raises ``WalletError`` ``other_user``.

    Where the kernel does not tell (outside Linux), the socket's mode and its directory's are the only guard.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, option, _UCRED.size)
    if _UCRED.unpack(credentials)[1] != os.getuid():
        raise WalletError("other_user", "The process at the other end of the socket belongs to another user.")
