"""What the scripts of the manifests use of `valkey-cli`, for machines without it: one command and its raw reply."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

from redis import Redis
from redis.exceptions import RedisError


def main() -> None:
    """Sends the command of the arguments and prints its reply, a line for each element. An error is a line, too."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--no-auth-warning", action="store_true")
    parser.add_argument("--user")
    parser.add_argument("-h", dest="host", default="127.0.0.1")
    parser.add_argument("-p", dest="port", type=int, default=6379)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with Redis(options.host, options.port, username=options.user, password=os.environ.get("REDISCLI_AUTH")) as redis:
        redis.response_callbacks.clear()  # replies as they come
        try:
            reply = redis.execute_command(*options.command)
        except RedisError as error:
            reply = str(error).encode()
    for line in reply if isinstance(reply, Iterable) and not isinstance(reply, bytes) else (reply,):
        print(line.decode() if isinstance(line, bytes) else line)


if __name__ == "__main__":
    main()
