"""A shell script as commands, each a list of words. Nothing is run: a variable is replaced only by a literal of the
same text.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.servers.base import SERVERS
from kvplan.servers.words.command import IN_FOLDER
from kvplan.servers.words.environment import assigned, exports

# Plain strings, compiled on first use: most commands need none of them.
_SUBSTITUTION: Final = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|\$\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_PIECES: Final = rf"""(?xs)
    (?P<join>\\+[ \t]*\r?\n|\\+\s*\Z)
    |(?P<single>'[^']*')
    |(?P<double>"(?:\\.|[^"\\])*")
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<substitution>{_SUBSTITUTION})
    |(?P<placeholder><[A-Za-z][\w .-]{{0,60}}>)
    |(?P<redirect>(?:(?<!\S)\d)?>>?(?:&\d)?|&>>?|<<<?-?|<)
    |(?P<end>\|\|?|&&?|;+|\r?\n)
    |(?P<space>[^\S\n]+)
    |(?P<escape>\\.)
    |(?P<paren>[()])
    |(?P<plain>[^\s'"\\;|&<>()$`]+|\$)
"""
_NAMED: Final = (
    r"\\(.)|(`[^`]*`|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))"
    r"|\$(?:([A-Za-z_]\w*|[0-9@*])|\{([A-Za-z_]\w*|[0-9]{1,2})(\[[@*]\])?(?:(:?[-+=?])([^{}]*(?:\{[^{}]*\}[^{}]*)*))?\})"
)
_ASSIGNED: Final = r"([A-Za-z_]\w*)(\+?)=(.*)"
_IMAGE: Final = r"(?:[\w.:-]+/)*[\w.-]*(?:{servers})[\w.-]*(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?"
_SCRIPT: Final = r"-[a-z]*c"
_PROMPT: Final = (
    r"(?m)^[ \t]*(?:(?:\([\w.-]+\)[ \t]*)?(?:[\w.-]+@[\w.-]+(?::[^\s$#]*)?[ \t]?[$#]|\$)[ \t]+"
    r"|PS [A-Z]:[^>\n]*>[ \t]*|!(?=[A-Za-z]))(?=\S)"
)
SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
MOST_SHELLS: Final = 4  # nested shells
MOST_EXPANDED: Final = 64 * 1024  # characters that variables add to a text
_OPENS: Final = ("if", "for", "while", "until", "case")
_CLOSES: Final = ("fi", "done", "esac")
_BETWEEN: Final = ("then", "else", "elif", "do", "{", "time", "!")


class Word(str):
    """A word in which variables were replaced: `values` by their names."""

    values: Mapping[str, str] = {}


Variables = dict[str, str | list[str] | None]  # None: assigned, but not one literal


def split(text: str, depth: int = 0, variables: Variables | None = None) -> list[list[str]]:
    """Split a script into commands, each a list of words. Comments are removed, lines joined, and variables replaced by
    literals of the text; nothing is run.

    A command that passes a script to a shell (`docker run IMAGE bash -c '...'`) yields the script's commands.
    """
    reader = Reader({} if variables is None else dict(variables))
    reader.read(plain(text))
    commands = [words for command in reader.commands for words in scripted(command, depth, reader.variables)]
    return commands or [[]]


def plain(text: str) -> str:
    """A text without prompts, typographic signs, and other shells' spellings of the same."""
    text = text.strip().replace("\u00a0", " ")
    if not text.isascii():
        text = re.sub(r"(?<!\S)[\u2013\u2014](?=[A-Za-z])", "--", text)
        text = text.translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'"})
    if "`" in text:  # PowerShell
        text = re.sub(r"(?m)(?<=\s)`[ \t]*\r?$", r"\\", text)
    if re.search(r"\^[ \t]*\r?$", text, re.MULTILINE) or re.match(r"(?i)@echo off|rem ", text):  # batch
        text = re.sub(r"(?m)\^[ \t]*\r?$", r"\\", text)
        text = re.sub(r"%([A-Za-z_]\w*)%", r"${\1}", text)
    text = re.sub(r"(?m)^[ \t]*\$(?:env:)?([A-Za-z_]\w*)[ \t]*=[ \t]*(?=[\"'\w])", r"export \1=", text)
    text = re.sub(r"\$env:([A-Za-z_]\w*)", r"${\1}", text)
    if re.search(r"(?i)(?<![\w\\])(?:[a-z]:|\.)\\(?=\w)|\.exe\b|^&[ \t]", text):  # of Windows
        text = re.sub(r"(?m)^[ \t]*&[ \t]+(?=[\"'$\w])", "", re.sub(r"(?<=[\w.:)}~])\\(?=[\w.~(-])", "/", text))
        text = re.sub(r"(?i)\.exe(?=[\"'\s]|$)", "", text)
    if re.search(_PROMPT, text):
        text = re.sub(r"(?m)^> ", "", re.sub(_PROMPT, "", text))
    commented = re.sub(r"(?m)^[ \t]*# ?", "", text)
    return commented if text.startswith("#") and all(line.lstrip()[:1] in "#" for line in text.splitlines()) else text


class Reader:
    """Reads the commands of a script.

    variables  values that are literals of the text; None where it assigns something else, or two values
    """

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.commands: list[list[str]] = []
        self.words: list[str] = []
        self.word: str | None = None
        self.values: dict[str, str] = {}
        self.alone: str | None = None  # the word is this variable's value, unquoted
        self.array: tuple[str, bool, list[str]] | None = None  # name, whether it is extended, elements
        self.skips = False  # the next word is where output goes
        self.here: str | None = None  # the mark of a here-document, once its line ends
        self.depth = 0
        self.is_conditional = False
        self.length, self.limit = 0, 0

    def read(self, text: str) -> None:
        position, pieces = 0, re.compile(_PIECES)
        self.limit = len(text) + MOST_EXPANDED
        while position < len(text):
            json_end = quoteless_json(text, position) if text[position] == "{" else None
            if json_end is not None:
                self.add(text[position:json_end])
                position = json_end
                continue
            match = pieces.match(text, position)
            if match is None:
                if any(map(names_server, self.commands)):
                    self.words, self.word = [], None
                    return  # behind the server's command
                raise UsageError("--from-command", "the quotes do not match", "paste the whole command")
            position = self.take(str(match.lastgroup), match[0], text, match.end())
        self.end_command("\n")

    def take(self, kind: str, piece: str, text: str, end: int) -> int:
        """Take one piece; returns where the next begins."""
        match kind:
            case "space" | "join":
                self.end_word()
            case "comment":
                pass
            case "single":
                self.add(piece[1:-1])
            case "escape":
                self.add(piece[1])
            case "double":
                if not self.elements(piece[1:-1]):
                    self.add(self.expanded(piece[1:-1], quoted=True))
            case "substitution" | "plain":
                if piece == "$" and text[end : end + 1] in ("'", '"'):
                    return end
                if piece == "$" and (name := re.compile(r"[A-Za-z_]\w*|[0-9@*#?]").match(text, end)):
                    piece, end = piece + name[0], name.end()
                self.add_unquoted(piece)
            case "placeholder":
                self.add(piece)
            case "redirect":
                return self.redirect(piece, text, end)
            case "paren":
                self.parenthesis(piece)
            case _:
                return self.end_line(piece, text, end)
        return end

    def add(self, text: str) -> None:
        self.alone = None
        self.word = (self.word or "") + text
        self.count(len(text))

    def count(self, added: int) -> None:
        self.length += added
        if self.length > self.limit:
            raise UsageError("--from-command", "its variables expand to too much text", "paste only the command")

    def add_unquoted(self, piece: str) -> None:
        if self.elements(piece):
            return
        is_first = self.word is None
        text = self.expanded(piece, quoted=False)
        self.add(text)
        if is_first and piece.startswith("$") and text != piece:
            self.alone = text

    def elements(self, piece: str) -> bool:
        """Replace ${NAME[@]}, if it is a word of its own, by the elements of an array that the text assigns."""
        match = re.fullmatch(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}", piece)
        value = None if match is None else self.variables.get(match[1])
        if self.word is not None or not isinstance(value, list):
            return False
        self.words += value
        self.count(sum(map(len, value)))
        return True

    def expanded(self, text: str, *, quoted: bool, depth: int = 0) -> str:
        """A text with the variables replaced that have one literal value."""

        def value(match: "re.Match[str]") -> str:
            escaped, run, name, braced, _, operator, default = match.groups()
            if escaped is not None:
                return " " if escaped == "\n" else str(escaped) if quoted and escaped in '$`"\\' else str(match[0])
            if run is not None:
                return self.computed(str(run))
            known = self.variables.get(name or braced)
            is_set = (name or braced) in self.variables
            if operator and operator.endswith("+"):
                return self.expanded(default, quoted=quoted, depth=depth + 1) if known else ""
            if isinstance(known, str) and not (operator and ":" in operator and not known):
                return self.used(name or braced, known)
            if operator and operator[-1] in "-=" and not (is_set and known is None) and depth < MOST_SHELLS:
                text = self.expanded(default.strip("\"'"), quoted=quoted, depth=depth + 1)
                if operator.endswith("=") and is_literal(text):
                    self.variables[braced] = text
                return self.used(braced, text) if text and is_literal(text) else text
            return str(match[0])

        return re.sub(_NAMED, value, text, flags=re.DOTALL) if "$" in text or "\\" in text else text

    def computed(self, run: str) -> str:
        """What `$((8 * 1024))` comes to; any other substitution as it is: nothing is run."""
        inner = run[3:-2] if run.startswith("$((") and run.endswith("))") else ""

        def known(match: "re.Match[str]") -> str:
            value = self.variables.get(match[1])
            return self.used(match[1], value) if isinstance(value, str) else "?"

        number = integer(re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", known, inner))
        return run if number is None else str(number)

    def used(self, name: str, value: str) -> str:
        self.values[name] = value
        return value

    def parenthesis(self, piece: str) -> None:
        match = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=", self.word or "")
        if piece == "(" and match is not None and self.array is None:
            self.word, self.array = None, (match[1], bool(match[2]), self.words)
            self.words = []
        elif piece == ")" and self.array is not None:
            self.end_word()
            name, extends, words = self.array
            before = self.variables.get(name, [] if extends else None)
            elements = [*before, *self.words] if extends and isinstance(before, list) else self.words
            self.set(name, None if extends and not isinstance(before, list) else elements)
            self.words, self.array = words, None
        elif piece == ")" and self.depth and "(" not in (self.word or ""):  # behind a pattern of `case`
            self.word, self.words = None, []
        elif self.word is not None:
            self.add(piece)

    def redirect(self, piece: str, text: str, end: int) -> int:
        self.end_word()
        mark = re.compile(r"[ \t]*[\"'\\]?(\w+)").match(text, end) if piece in ("<<", "<<-") else None
        if mark is not None:
            self.here = mark[1]
            return min(mark.end() + (text[mark.end() : mark.end() + 1] in ("'", '"')), len(text))
        self.skips = not re.search(r"&\d$", piece)
        return end

    def end_word(self) -> None:
        if self.word is None:
            return
        if self.skips:
            self.skips = False
        elif self.alone is not None and self.alone.split() != [self.alone] and not self.alone.lstrip().startswith("{"):
            self.words += [self.with_values(part) for part in words_of(self.alone)]
        else:
            self.words.append(self.with_values(self.word))
        if self.array is None:
            self.assign()
        self.word, self.values, self.alone = None, {}, None

    def with_values(self, text: str) -> str:
        word = text
        if self.values:
            word = Word(text)
            word.values = dict(self.values)
        return word

    def assign(self) -> None:
        """Remember an assignment: a word in front of a command, or of `export`."""
        if not self.words or not (match := re.fullmatch(_ASSIGNED, self.words[-1], re.DOTALL)):
            return
        before = self.words[:-1]
        if all(re.match(r"\w+\+?=", word) for word in before) or exports(before):
            name, extends, value = match.groups()
            earlier = self.variables.get(name, "") if extends else ""
            is_known = is_literal(value) or re.fullmatch(IN_FOLDER, value) is not None
            self.set(name, earlier + value if is_known and isinstance(earlier, str) else None)

    def set(self, name: str, value: str | list[str] | None) -> None:
        if (self.depth or self.is_conditional) and self.variables.get(name) != value:
            value = None
        self.variables[name] = value

    def end_line(self, piece: str, text: str, end: int) -> int:
        self.end_word()
        if self.array is not None and "\n" in piece:
            return end
        if "\n" in piece and self.here is not None:
            closing = re.compile(rf"^[ \t]*{re.escape(self.here)}[ \t]*$", re.MULTILINE).search(text, end)
            end, self.here = len(text) if closing is None else closing.end(), None
        elif "\n" in piece and self.words and self.goes_on(text, end):
            return end
        self.end_command(piece)
        return end

    def goes_on(self, text: str, start: int) -> bool:
        """True if a line continues the command although the backslash is missing: flags, or indented words of a
        server's command.
        """
        line = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*([ \t]*)(\S?\S?)").match(text, start)
        if line is None or not line[2]:
            return False
        is_flag = re.fullmatch(r"-[-A-Za-z]", line[2]) is not None
        return is_flag or (len(line[1]) > 1 and line[2] not in ("fi", "do", "}") and ends_as_server(self.words))

    def end_command(self, piece: str) -> None:
        self.end_word()
        while self.words and (self.words[0] in _BETWEEN or self.words[0] in _OPENS or self.words[0] in _CLOSES):
            word = self.words.pop(0)
            self.depth += (word in _OPENS) - (word in _CLOSES)
            if word in ("for", "case"):
                self.words = []
        if self.words and self.words != ["}"]:
            self.commands.append(self.words)
        self.words = []
        last = self.commands[-1][0] if self.commands else ""
        self.is_conditional = piece == "||" or (piece == "&&" and last in ("[", "[[", "test"))


def ends_as_server(words: list[str]) -> bool:
    """True if a command is the start of a server so far without its arguments."""
    return names_server(words) and (words[-1] == "serve" or words[-2] == "-m")


def integer(text: str) -> int | None:
    """The value of whole numbers with + - * / % and parentheses, as a shell computes them; None for anything else."""
    if not re.fullmatch(r"[\d\s()+*/%-]{1,100}", text):
        return None
    import ast  # only for such a text

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = value(left), value(right)
                match operator:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.Div() | ast.Mod() if b:
                        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # toward zero
                        return quotient if isinstance(operator, ast.Div) else a - b * quotient
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def is_literal(text: str) -> bool:
    return re.search(r"\$[\w{(@*]|`", text) is None


def words_of(text: str) -> list[str]:
    """Words of a variable's value: its quotes are kept together, unlike in a shell, which nobody means."""
    import shlex

    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def quoteless_json(text: str, start: int) -> int | None:
    """Where an object of JSON ends that stands in a script without quotes around it, or None if there is none."""
    import json

    if not re.compile(r'\{\s*"').match(text, start):
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end


def scripted(words: list[str], depth: int, variables: Variables) -> list[list[str]]:
    """Commands of the script that the words pass to a shell, after an export of their variables; otherwise the
    words.
    """
    flag = script_flag(words)
    if flag is None or depth == MOST_SHELLS:
        return [words]
    front = words[:flag]
    own = assigned([], front)
    images = [word for word in front if re.fullmatch(_IMAGE.format(servers="|".join(SERVERS)), word)]
    literals = {name: value for name, value in own.items() if value is not None and is_literal(value)}
    position = script_index(words, flag)
    script = words[position]
    if parameters := words[position + 2 :]:  # `bash -c SCRIPT NAME "$@"`
        import shlex  # as in `split`

        script = re.sub(r'"\$@"|\$@', lambda _: shlex.join(parameters), script)
    commands = [
        [*images, *command] if names_server(command) else command
        for command in split(script, depth + 1, {**variables, **literals})
    ]  # the image implies the release
    exported = [name if value is None else f"{name}={value}" for name, value in own.items()]
    return [["export", *exported], *commands] if exported else commands


def script_flag(words: list[str]) -> int | None:
    """Index of the flag whose value is a shell script: `bash -lc SCRIPT`, `--entrypoint bash IMAGE -c SCRIPT`."""
    shell = next((index for index, word in enumerate(words) if is_shell(word)), len(words))
    flags = (index for index in range(shell + 1, len(words) - 1) if re.fullmatch(_SCRIPT, words[index]))
    return next(flags, None)


def script_index(words: list[str], flag: int) -> int:
    """Index of the script behind its flag: other options may stand between, `bash -c -i SCRIPT`."""
    others = (index for index in range(flag + 1, len(words)) if not re.fullmatch(r"-[a-z]+", words[index]))
    return next(others, flag + 1)


def is_shell(word: str) -> bool:
    return word.removeprefix("--entrypoint=").rpartition("/")[2] in SHELLS


def framework_server(module: str) -> str | None:
    """The server that a framework's module of its name starts, with the server's own words: `-m dynamo.vllm`."""
    return module.partition(".")[2] if module.partition(".")[2] in SERVERS else None


def framework_note(module: str) -> tuple[str, ...]:
    """What is not read of a server that a framework starts."""
    own = f"the server is started by {module}: what that sets itself is not read"
    return (own,) if framework_server(module) else ()


def names_server(words: Iterable[str]) -> bool:
    """True if the words start a server themselves rather than being arguments for an image's entrypoint."""
    words = list(words)
    pairs = zip(words, [*words, ""][1:], strict=True)
    return any(
        (word.rpartition("/")[2] in SERVERS and following in ("serve", "bench"))
        or (word == "-m" and (following.partition(".")[0] in SERVERS or framework_server(following) is not None))
        for word, following in pairs
    )
