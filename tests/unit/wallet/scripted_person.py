"""A person for the wallet's commands: says what a test wrote down, remembers what was shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvasir_console import cli
from kvasir_console.config import Config, NetworkConfig, WalletConfig
from kvasir_console.paths import Paths
from kvasir_console.wallet import vault
from kvasir_console.wallet.command_base import Command

PASSPHRASE = "correct horse battery"
CHEAP = vault.KdfCost(2, 19 * 1024)
Answer = str | Callable[["Scripted"], str]


class Scripted:
    """Answers by the beginning of each question; several answers to one are given in turn."""

    def __init__(self, **answers: Answer | list[Answer]) -> None:
        self.answers = {
            name.replace("_", " ").lower(): list(value) if isinstance(value, list) else value
            for name, value in answers.items()
        }
        self.questions: list[str] = []
        self.echoed: list[str] = []
        self.shown: list[str] = []
        self.secrets: list[str] = []
        self.screen = (0, 0)

    def _answer(self, question: str) -> str:
        self.questions.append(question)
        for beginning, answer in self.answers.items():
            if question.lower().startswith(beginning):
                if isinstance(answer, list):
                    answer = answer.pop(0)
                return answer(self) if callable(answer) else answer
        raise AssertionError(f"nobody expected the question {question!r}")

    def ask(self, question: str) -> str:
        answer = self._answer(question)
        self.echoed.append(answer)
        return answer

    def ask_secret(self, question: str) -> str:
        return self._answer(question)

    def size(self) -> tuple[int, int]:
        return self.screen

    def show(self, text: str) -> None:
        self.shown.append(text)

    def show_secret(self, text: str, question: str) -> None:
        self.secrets.append(text)
        self.questions.append(question)

    @property
    def asked_for_word(self) -> int:
        """The place of the word that the last question is about."""
        return int(self.questions[-1].removeprefix("Word ").rstrip(": "))


def make_command(paths: Paths, person: Scripted | None, *words: str, wallet: WalletConfig | None = None) -> Command:
    """``kvasir-console wallet WORDS`` as it is parsed, with a person in the terminal's place."""
    arguments = cli._parser().parse_args(["wallet", *words])
    settings = wallet or WalletConfig(kdf="interactive", rpc_url="http://127.0.0.1:9")
    config = Config(network=NetworkConfig(gateway="https://gate.example.net"), wallet=settings)
    return Command(arguments, config, paths, person)


def passphrase_file(directory: Path, text: str = PASSPHRASE) -> Path:
    file = directory / "passphrase"
    file.write_text(text + "\n")
    file.chmod(0o600)
    return file
