"""Templates that attack: they end in two seconds and 256 MB, run no code and read no files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgert.errors import RequestError
from edgert.template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
GROWING = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "nested loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "loop with a costly condition": "{% for a in range(99999) if range(99999)|sum %}{% endfor %}",
    "recursive loop": "{% for x in [[1], [1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "text times number": "{{ 'a' * 1000000000 }}",
    "number times text": "{% set n = 1000000000 %}{{ n * 'a' }}",
    "list times number": "{% set x = [0] * 1000000000 %}",
    "doubling with +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling with ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with a block": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling with a macro": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(99) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    "doubling with a call block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "a"
    + "{% endcall %}" * 40,
    "doubling with format": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling with replace": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by nesting": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nesting dictionaries": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "nesting by dict()": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "join": "{% set x = 'a' * 900000 %}{{ range(99999)|list|join(x) }}",
    "join of many": "{% set x = 'a' * 900000 %}{{ ([x] * 99999)|join }}",
    "method join": "{% set x = 'a' * 900000 %}{{ x.join(['a'] * 99999) }}",
    "replace": "{% set x = 'a' * 900000 %}{{ x|replace('a', x) }}",
    "method replace": "{% set x = 'a' * 900000 %}{{ x.replace('a', x) }}",
    "replace of nothing": "{% set x = 'a' * 900000 %}{{ x.replace('', x) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent width from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "percent many times": "{% set x = 'a' * 900000 %}{% set f = '%(x)s' * 100000 %}{{ f % {'x': x} }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format many times": "{% set x = 'a' * 900000 %}{{ ('{0}' * 100000).format(x) }}",
    "printing a list of long texts": "{% set x = ['a' * 900000] * 99999 %}{{ x }}",
    "hoarding slices": "{% set ns = namespace(x=[]) %}{% set y = '一' * 900000 %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x, y[1:]] %}{% endfor %}",
    "hoarding filters": "{% set ns = namespace(x=[]) %}{% set y = '一' * 900000 %}{% for i in range(60) %}"
    "{% for k in range(999) %}{% set ns.x = [ns.x, y|upper] %}{% endfor %}{% endfor %}",
    "hoarding lists": "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% for k in range(999) %}"
    "{% set ns.x = [ns.x, range(99999)|list] %}{% endfor %}{% endfor %}",
    "characters as a list": "{% set x = '一' * 1000000 %}{{ x|list|length + (x|list|length) }}",
    "hoarding splits": "{% set ns = namespace(x=[]) %}{% set y = 'a ' * 500000 %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, y.split(' ')] %}{% endfor %}",
    "indent": "{{ 'a'|indent(1000000000, true) }}",
    "indent of lines": "{{ ('\n' * 900000)|indent(9999) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "tojson indent": "{{ [1]|tojson(indent=1000000000) }}",
    "tojson of many": "{{ ([[[1]]] * 90000)|tojson(indent=900) }}",
    "sum of lists": "{{ ([['a' * 900] * 999] * 999)|sum(start=[]) }}",
    "round": "{{ 1.5|round(1000000000, 'ceil') }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    "{{ ns.x % 7 }}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro that branches": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "block of long texts": "{% set x = 'a' * 900000 %}{% set y %}{% for i in range(99999) %}{{ x }}"
    "{% endfor %}{% endset %}",
    "output of long texts": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "filter block": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 90000 }}{% endfor %}{% endfilter %}",
    "time": "{{ strftime_now('%1000000000d') }}",
}
REFUSED = {
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ ''['__class__'].mro() }}",
    "class by filter": "{{ (''|attr('__class__')).mro() }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "class by format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'].modules }}",
    "the loop's context": "{% for a in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "the environment": "{{ self.__init__.__globals__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'system'}) }}",
}


def rendered(source: str) -> str:
    return "".join(ChatTemplate(source).render(USER))


ATTACKS = """
import json, sys, threading, time
from test_template_limits import GROWING, rendered
try:
    import resource
except ImportError:  # Windows
    resource = None
unit = 1 if sys.platform == "darwin" else 1024


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20 if resource else 0


def attack(source):
    began = time.thread_time()
    try:
        rendered(source)
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found.append((error, time.thread_time() - began, peak() - before))


rendered("warm")
before, found = peak(), []
for source in GROWING.values():
    thread = threading.Thread(target=attack, args=(source,))
    thread.start()
    thread.join()
print(json.dumps(dict(zip(GROWING, found, strict=True))))
"""


@pytest.fixture(scope="module")
def attacked() -> dict[str, tuple[str, float, int]]:
    """How each attack ended, after how many seconds of the processor, and by how many MB memory had grown then.

    In a fresh process, each from a thread, since nothing may depend on the main thread.
    """
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{ATTACKS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, tuple[str, float, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_stopped_quickly(name: str, attacked: dict[str, tuple[str, float, int]]) -> None:
    error, seconds, _ = attacked[name]
    assert error.startswith("RequestError: ") and "was stopped" in error
    assert seconds < 2


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_dangerous_things_are_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"unsafe|no loader|blocks ranges"):
        rendered(source)


@pytest.mark.skipif(sys.platform == "win32", reason="getrusage is not there")
def test_memory_stays_within_256_mb(attacked: dict[str, tuple[str, float, int]]) -> None:
    grown = {name: megabytes for name, (_, _, megabytes) in attacked.items()}
    assert max(grown.values()) < 256, grown


def test_the_next_render_works() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}"
        "{% for k in range(99999) %}{% endfor %}{% endfor %}{% endif %}fine"
    )
    with pytest.raises(RequestError, match="stopped"):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render(USER) == ["fine"]


def test_a_slow_template_stops_others_not() -> None:
    slow = ChatTemplate(GROWING["nested loops"])
    quick = ChatTemplate("{{ messages[0].content }}")
    outcomes: list[str] = []

    def attack() -> None:
        try:
            slow.render(USER)
        except RequestError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=attack)
    thread.start()
    assert all(quick.render(USER) == ["Hi"] for _ in range(20))
    thread.join()
    assert outcomes and "stopped" in outcomes[0]


def test_a_long_conversation_is_no_attack() -> None:
    """Two megabytes of text in a thousand messages through a template that copies it several times."""
    source = (
        "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = m.role + ': ' + "
        "m.content|trim ~ '\n' %}{{ ns.all.split('\n')|join('\n') }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 400} for _ in range(1000)]
    assert len("".join(ChatTemplate(source).render(messages))) > 1_900_000
