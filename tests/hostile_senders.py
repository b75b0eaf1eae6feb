"""Processes that try everything against the progress sockets. The standard library alone: it also runs inside jobs.

    python hostile_senders.py SHARED_SOCKET SOCKET_OF_ANOTHER_RUN OWN_SOCKET TITLE PROCESSES

``TITLE`` is the other run's slurmstepd's. Prints how many processes tried each kind, as JSON.
"""

import array
import ctypes
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

SHARED, VICTIM, OWN, TITLE = sys.argv[1:5] if len(sys.argv) > 5 else [""] * 4
WORDS = (
    *(b"", b"x", b"\0" * 256, bytes(range(256)), b"y" * 4096, b"pfi-progress 1 5 " + b"t" * 300),
    *(
        b"pfi-progress 1 %s tokens" % word
        for word in (b"nan", b"inf", b"-5", b"1e999", b"1e300", b"0x5", b"5\n")
    ),
    *(b"pfi-progress 2 5 tokens", b"pfi-progress 1 5 tokens 41", b"pfi-progress 1 5 tokens job=41"),
)
ABSURD = b"pfi-progress 1 999999999999 tokens"


def send(
    data: bytes = ABSURD, *ancillary: tuple[int, int, bytes], paths: tuple[str, ...] = (SHARED, VICTIM, OWN)
) -> None:
    """Try it on every socket, without waiting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        for path in paths:
            try:
                out.sendmsg([data], ancillary, 0, path)
            except OSError:
                continue


def garbage(number: int) -> None:
    for word in WORDS:
        send(word)


def aimed_at_the_other_run(number: int) -> None:
    for _ in range(20):
        send(paths=(VICTIM,))


def credentials(number: int) -> None:
    for pid, uid in ((1, 0), (os.getppid(), 0), (os.getpid(), 0), (2**31 - 1, os.getuid()), (-1, 0), (0, 0)):
        try:
            raw = struct.pack("iII", pid, uid, 0)
            send(ABSURD, (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, raw))
        except OSError:
            continue


def descriptors(number: int) -> None:
    """Two hundred pipe ends, and a connection whose last close lingers for an hour."""
    held = os.pipe()
    send(ABSURD, (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*held] * 100).tobytes()))
    listener = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(listener.getsockname())
    out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    out.setblocking(False)
    try:
        while out.send(b"x" * 65536):
            pass
    except BlockingIOError:
        pass
    send(ABSURD, (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", out.fileno())))
    os._exit(0)  # ours closes first, so that the last close is the receiver's


def flood(number: int) -> None:
    for _ in range(300):
        send()


def patient_flood(number: int) -> None:
    """Blocking sends wait in the kernel's line and take every place that gets free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.settimeout(0.2)
        try:
            for _ in range(20):
                out.sendto(ABSURD, SHARED)
        except OSError:
            pass


def jumping_counter(number: int) -> None:
    for word in (b"0", b"1e24", b"7", b"1e12", b"3.5", b"99999999999999999999"):
        send(b"pfi-progress 1 " + word + b" tokens")


def short_lives(number: int) -> None:
    """Each datagram from another pid, whose owner is gone at once."""
    for _ in range(4):
        if os.fork() == 0:
            send()
            os._exit(0)
        os.wait()


def namespace(number: int) -> None:
    """Root of a user and process namespace of its own may claim any pid that it sees there."""
    uid = os.getuid()
    if ctypes.CDLL(None).unshare(0x1000_0000 | 0x2000_0000):  # NEWUSER, NEWPID
        return
    try:
        with open("/proc/self/uid_map", "w") as text:  # noqa: PTH123 - written in one call
            text.write(f"0 {uid} 1")
    except OSError:
        pass
    child = os.fork()
    if child == 0:
        credentials(number)
        send()
        os._exit(0)
    os.waitpid(child, 0)


def thread(number: int) -> None:
    running = [threading.Thread(target=send) for _ in range(8)]
    for each in running:
        each.start()
    for each in running:
        each.join()


def daemon(number: int) -> None:
    """Out of the session and away from its slurmstepd."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.05)
            send()
            os._exit(0)
        os._exit(0)
    os.wait()


def pretender(number: int) -> None:
    """A process with the name and the title of the other run's slurmstepd; its child sends."""
    code = (
        "import ctypes, os, runpy, sys\n"
        "ctypes.CDLL(None).prctl(15, b'slurmstepd', 0, 0, 0)\n"
        "if os.fork() == 0:\n"
        f"    sys.argv = {[__file__, *sys.argv[1:5], '0', '']!r}\n"
        f"    runpy.run_path({__file__!r})['send']()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    os.execv(sys.executable, [TITLE, "-S", "-c", code])


KINDS: tuple[Callable[[int], None], ...] = (
    *(garbage, aimed_at_the_other_run, credentials, descriptors, flood, patient_flood, jumping_counter),
    *(short_lives, namespace, thread, daemon, pretender),
)


def main(processes: int) -> None:
    tried = dict.fromkeys((kind.__name__ for kind in KINDS), 0)
    for number in range(processes):
        kind = KINDS[number % len(KINDS)]
        tried[kind.__name__] += 1
        if os.fork() == 0:
            try:
                kind(number)
            finally:
                os._exit(0)
        if number >= 15:
            os.wait()  # sixteen at a time
    try:
        while True:
            os.wait()
    except ChildProcessError:
        sys.stdout.write(json.dumps(tried) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[5]))
