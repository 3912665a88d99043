"""The console on a terminal: one reader, one message a second, one dashboard."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from textual.app import App, SystemCommand
from textual.message import Message
from textual.screen import Screen

from kvasir_console import logs
from kvasir_console.config import Config
from kvasir_console.errors import ExitCode, NetworkError, UsageError
from kvasir_console.node.overrides import flag_names
from kvasir_console.paths import Paths
from kvasir_console.screens.dashboard import Dashboard
from kvasir_console.screens.dialogs import TEXT_CELLS, ConfirmScreen, UnlockScreen
from kvasir_console.screens.graph import Symbols, default_symbols
from kvasir_console.screens.line import Role, Span, clean, line, wrap
from kvasir_console.screens.reader import NodeView, Reader
from kvasir_console.screens.source import AttachedSource, EmbeddedSource, SnapshotSource
from kvasir_console.screens.theme import KVASIR
from kvasir_console.screens.widgets.prompt import Prompt
from kvasir_console.wallet.passphrase import read_passphrase

INTERVAL_S = 1.0
_NO_MARKUP = str.maketrans("[]\\", "()/")
"""The palette reads its commands as markup; a node's name is not."""


@dataclass(frozen=True, slots=True)
class LocalAction:
    """A key of the caller's own: ``run`` returns what a person reads when it is done. It may raise ``KvasirError``."""

    key: str
    name: str
    run: Callable[[], Awaitable[str]]


class Snapshots(Message):
    """What one round of reading found; a newer one replaces one that still waits."""

    def __init__(self, views: tuple[NodeView, ...]) -> None:
        super().__init__()
        self.views = views

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Snapshots)


class ConsoleApp(App[int]):
    """The screens over one or several nodes.

    Args:
        sources: the nodes, in the order of their keys 1 to 9; at least one.
        prompt: streams an answer; without it there is no prompt panel.
        prompt_hint: what stands in the prompt's empty field.
        actions: more keys.
        read_only: neither claims nor unlocks, and no key changes that.
        quit_warning: what quitting stops; with it, quitting asks first.
        notice: what a person should read first.
        keymap: binding id to keys, for those who want others.
        symbols: graph symbols; ``None`` takes what the terminal can draw.
        clock: Unix time in seconds.
        interval_s: pause between two rounds of reading.
    """

    TITLE = "kvasir-console"
    CSS_PATH = "console.tcss"

    def __init__(
        self,
        sources: Sequence[SnapshotSource],
        *,
        prompt: Prompt | None = None,
        prompt_hint: str = "",
        actions: Sequence[LocalAction] = (),
        read_only: bool = False,
        quit_warning: str = "",
        notice: str = "",
        keymap: Mapping[str, str] | None = None,
        symbols: Symbols | None = None,
        clock: Callable[[], float] = time.time,
        interval_s: float = INTERVAL_S,
    ) -> None:
        if not sources:
            raise ValueError("a console without a node has nothing to show")
        if os.environ.get("NO_COLOR") == "":
            del os.environ["NO_COLOR"]  # Textual takes an empty one for set; no-color.org says it is not
        super().__init__()
        self.animation_level = "none"
        self.register_theme(KVASIR)
        self.theme = KVASIR.name
        self._reader = Reader(sources, clock)
        self._actions = tuple(actions)
        self._quit_warning = quit_warning
        self._notice = notice
        self._keymap_wanted = dict(keymap or {})
        self._interval_s = interval_s
        symbols = symbols or default_symbols()
        self.set_class(symbols is Symbols.ASCII, "-ascii")
        self.dashboard = Dashboard(
            sources, clock, prompt=prompt, prompt_hint=prompt_hint, read_only=read_only, symbols=symbols
        )

    def get_default_screen(self) -> Screen[None]:
        return self.dashboard

    def on_mount(self) -> None:
        for index, action in enumerate(self._actions):
            self.bind(action.key, f"local_action({index})", description=action.name)
        if self._keymap_wanted:
            self.set_keymap(self._keymap_wanted)
        self.run_worker(self._follow(), name="snapshots", group="snapshots")
        if self._notice:
            self.dashboard.say(self._notice, "warning")

    async def on_unmount(self) -> None:
        await self._reader.close()

    async def _follow(self) -> None:
        while True:
            await self.read_now()
            await asyncio.sleep(self._interval_s)

    async def read_now(self) -> None:
        """One round of reading, posted as one message."""
        self.post_message(Snapshots(await self._reader.read()))

    def on_snapshots(self, message: Snapshots) -> None:
        self.dashboard.paint(message.views)

    def action_local_action(self, index: int) -> None:
        action = self._actions[index]
        self.dashboard.say(f"{action.name} has begun.", "information")
        self.dashboard.act(action.run, action.name)

    async def action_quit(self) -> None:
        """Quit; where that stops a node, ask first. Asked twice it quits."""
        if not self._quit_warning or isinstance(self.screen, ConfirmScreen):
            self.exit(int(ExitCode.OK))
            return

        def decided(yes: bool | None) -> None:
            if yes:
                self.exit(int(ExitCode.OK))

        texts = [line(Span(row, Role.TEXT)) for row in wrap(self._quit_warning, TEXT_CELLS)]
        self.push_screen(ConfirmScreen("Quit", texts, yes="Quit"), decided)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """No palette over a passphrase."""
        if action == "command_palette" and isinstance(self.screen, UnlockScreen):
            return False
        return super().check_action(action, parameters)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:  # noqa: ARG002
        """Themes and every key of the dashboard. No screenshot: a file of the screen is not what a wallet wants."""
        yield SystemCommand("Theme", "Change the colours", self.action_change_theme)
        for index, name in enumerate(self.dashboard.names):
            plain = clean(name).translate(_NO_MARKUP)
            yield SystemCommand(f"Node {index + 1}: {plain}", "Show it", partial(self.dashboard.action_select, index))
        skipped = {"Select node", "Commands", "Back"}
        for active in self.dashboard.active_bindings.values():
            binding = active.binding
            if active.enabled and (binding.id or binding.show) and binding.description not in skipped:
                skipped.add(binding.description)
                about = f"Key {self.get_key_display(binding)}"
                yield SystemCommand(binding.description, about, self._runs(binding.action, active.node))

    def _runs(self, action: str, node: object) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.run_action(action, default_namespace=node)  # type: ignore[arg-type]

        return run


async def run_app(app: ConsoleApp) -> int:
    """Run until a person quits or the process is asked to stop. Returns an exit code.

    SIGTERM and SIGHUP end the app in order, so that the terminal is restored and whatever runs beside it can drain;
    their handlers are taken over for that time.

    Raises:
        UsageError: a terminal that cannot show screens.
    """
    if os.environ.get("TERM", "") in ("dumb", "unknown"):
        raise UsageError(
            "dumb_terminal",
            f"TERM={os.environ['TERM']} cannot show screens.",
            "Set TERM to what the terminal is, or run kvasir-console --headless.",
        )
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, app.exit, int(ExitCode.OK))
    try:
        result = await app.run_async()
    finally:
        for number in signals:
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(number)
    return int(app.return_code or result or ExitCode.OK)


def run_console(config: Config, arguments: argparse.Namespace) -> int:
    """``kvasir-console`` on a terminal: the screens over the node that runs with this home, else over a new one here.

    Raises:
        UsageError: a ``--set`` that the running node would ignore.
        KvasirError: what ended the node, or kept it from starting.
    """
    return asyncio.run(_console(config, arguments))


async def _console(config: Config, arguments: argparse.Namespace) -> int:
    paths = Paths.from_environment().ensure()
    running = AttachedSource(paths.runtime / "node.sock", "the node that runs here")
    try:
        locked = (await running.snapshot()).wallet_locked
        notice = _attached_notice(await running.ignored(config, flag_names(arguments.set)), arguments, locked=locked)
        if notice:
            print(notice, file=sys.stderr, flush=True)  # it stays when the screens are gone
        return await run_app(ConsoleApp([running], notice=notice))
    except NetworkError as error:
        if error.code != "no_node_there":
            raise
    finally:
        await running.close()
    return await _embedded(config, arguments, paths)


def _attached_notice(variables: Sequence[str], arguments: argparse.Namespace, *, locked: bool) -> str:
    """What this command was given and the node that runs here does not follow."""
    told = []
    if variables:
        told.append(f"{', '.join(variables)} {'has' if len(variables) == 1 else 'have'} no effect on it.")
    if locked and (arguments.passphrase_file is not None or arguments.passphrase_fd is not None):
        flag = "--passphrase-file" if arguments.passphrase_file is not None else "--passphrase-fd"
        told.append(f"{flag} does not unlock it. Press u, or run kvasir-console wallet unlock.")
    if not told:
        return ""
    return f"A node runs here already{', with other settings' if variables else ''}. {' '.join(told)}"


async def _embedded(config: Config, arguments: argparse.Namespace, paths: Paths) -> int:
    """A node in this process. It answers on its socket too, so that ``status`` and ``claim`` find it."""
    from kvasir_console.node import overrides
    from kvasir_console.node.admin import AdminServer
    from kvasir_console.node.node import Node

    logs.configure(paths.log_file)
    passphrase = read_passphrase(
        file=Path(arguments.passphrase_file) if arguments.passphrase_file else None,
        fd=arguments.passphrase_fd,
        prompt=None,
    )
    node = Node(config, paths)
    app = ConsoleApp(
        [EmbeddedSource(node, node.name)],
        quit_warning="The node runs in this console. Quitting ends its last requests, then stops it.",
    )
    async with AdminServer(paths.runtime / "node.sock", {**node.verbs(), **overrides.verbs(config)}):
        task = asyncio.create_task(node.run(passphrase), name="node")
        task.add_done_callback(lambda _: app.exit(int(ExitCode.FAILURE)))
        try:
            return await run_app(app)
        finally:
            node.stop()
            await task


async def run_local(
    sources: Sequence[SnapshotSource],
    prompt: Prompt | None = None,
    *,
    prompt_hint: str = "",
    actions: Sequence[LocalAction] = (),
    read_only: bool = False,
    quit_warning: str = "",
) -> int:
    """The screens of local mode, inside a loop that already runs. Parameters as ``ConsoleApp``'s."""
    app = ConsoleApp(
        sources,
        prompt=prompt,
        prompt_hint=prompt_hint,
        actions=actions,
        read_only=read_only,
        quit_warning=quit_warning,
    )
    return await run_app(app)
