"""``python -m kvasir_console.engine.process``: one engine child. Its parent is the console's supervisor."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
from pathlib import Path

import psutil

from kvasir_console import logs


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvasir-engine", description="An engine process (started by the console).")
    parser.add_argument("--runtime", type=Path, required=True, help="private directory for the sockets")
    parser.add_argument("--name", required=True, help="name of this engine's sockets")
    parser.add_argument("--threads", type=int, default=0, help="compute threads (0: physical cores)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--expert-device", default="", help="where routed experts are, if not on --device")
    parser.add_argument("--kernels", default="auto", help="auto, native, eager or reference")
    parser.add_argument("--kv-type", default="f32", help="f32, f16, bf16 or q8_0")
    arguments = parser.parse_args()
    logs.configure(to_stderr=True)
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks an engine that hangs where it is
    # MKL may pick another code path for another alignment of the same data; one fixed path keeps a row's bits.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

    import torch

    from kvasir_console.engine.process.loaded import ComputeOptions
    from kvasir_console.engine.process.server import EngineServer
    from kvasir_console.engine.process.verbs import Engine

    threads = arguments.threads or psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)

    async def serve() -> None:
        compute = ComputeOptions(
            arguments.device, arguments.kernels, arguments.kv_type, arguments.expert_device, threads
        )
        engine = Engine(arguments.runtime, compute)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, engine.exiting.set)
        await EngineServer(engine, arguments.runtime, arguments.name).run()

    asyncio.run(serve())
    logging.shutdown()
    # The compute thread may be inside a long step; nothing is left to save, so do not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
