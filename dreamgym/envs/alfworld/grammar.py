"""Texts from a TextWorld grammar: what `ContextSensitiveGrammar.derive` writes, without parsing and copying
everything anew for every word.

Facts are {(predicate, types): frozenset of names}, in two layers: those of the start of the game and those
changed since. A mapping is {(placeholder, its type): (name, its type)}: TextWorld compares both.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

Signature = tuple[str, tuple[str, ...]]
Facts = dict[Signature, frozenset[tuple[str, ...]]]
Mapping = dict[tuple[str, str], tuple[str, str]]


def aside(parse: Callable):
    """parse() on a stack of its own: TextWorld's parsers keep the frames of their last call, and through them
    every object of every caller."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(parse).result()


@lru_cache(maxsize=4096)
def _symbols(text: str) -> list:
    from textworld.envs.pddl.textgen import _parse_and_convert
    return aside(lambda: _parse_and_convert(text, rule_name="symbols"))


@lru_cache(maxsize=1024)
def _query(text: str) -> list[tuple[str, tuple[str, ...], list[tuple[str, str]]]]:
    """"p(x:a, y:b) & q(x:a)" -> [(predicate, types, placeholders)]."""
    from textworld.logic import Rule
    return [(p.name, tuple(p.signature.types), [(ph.name, ph.type) for ph in p.parameters])
            for p in aside(lambda: Rule.parse_conjunctive_query(text)).preconditions]


@lru_cache(maxsize=1024)
def words(expression: str) -> list[str]:
    return sorted(set(re.findall(r"[A-Za-z_]\w*", expression)))


def _computed(node: ast.expr, variables: dict):
    """The value of an expression of things, attributes, strings, + and or; TextWorld would run any Python."""
    match node:
        case ast.Name():
            return variables[node.id]
        case ast.Constant():
            return node.value
        case ast.Attribute() if not node.attr.startswith("_"):
            return getattr(_computed(node.value, variables), node.attr)
        case ast.BinOp(op=ast.Add()):
            return _computed(node.left, variables) + _computed(node.right, variables)
        case ast.BoolOp(op=ast.Or()):
            return next((found for part in node.values if (found := _computed(part, variables))), None)
    raise ValueError(f"a grammar computes {ast.unparse(node)!r}; expected attributes, strings, + and or")


class Narrator:
    """Writes the texts of one game. `types`: [(name, supertypes)] of the PDDL domain; `entities`: name ->
    what the grammar's expressions read."""

    def __init__(self, rules: dict, types: list, entities: dict, first_facts: Facts):
        from textworld.logic import Type, TypeHierarchy
        self.rules, self.entities, self.first_facts = rules, entities, first_facts
        self.hierarchy = TypeHierarchy()
        # of a type named twice the first counts ("object" is PDDL's own and ALFWorld's)
        for name, supertypes in dict(reversed(types)).items():
            self.hierarchy.add(Type(name, supertypes))
        self._signatures: dict[Signature, list[Signature]] = {}
        self._values: dict[tuple, str] = {}

    def text(self, template: str, mapping: Mapping, changed: Facts) -> str:
        return self._write(_symbols(template), mapping, changed)

    def _write(self, symbols: list, mapping: Mapping, changed: Facts) -> str:
        return "".join([part for symbol in symbols for part in self._parts(symbol, mapping, changed)])

    def _parts(self, symbol, mapping: Mapping, changed: Facts) -> list[str]:
        kind = type(symbol).__name__
        if kind == "TerminalSymbol":
            return [str(symbol.symbol)]
        if kind == "EvalSymbol":
            return [self._value(symbol.expression, mapping)]
        if kind == "NonterminalSymbol":
            return [self._rule(symbol.symbol, mapping, changed)]
        if kind == "ConditionalSymbol":          # {expression | query}: a text for each answer of the query
            found = self._answers(_query(symbol.given), mapping, changed) if symbol.given else [mapping]
            return [self._write([symbol.expression], answer, changed) for answer in found]
        assert kind == "ListSymbol", kind
        items = self._parts(symbol.symbol, mapping, changed)
        if not items:
            return [self._rule("list_empty", mapping, changed)]
        if len(items) == 1:
            return items
        separator = self._rule("list_separator", mapping, changed)
        return [separator.join(items[:-1]), self._rule("list_last_separator", mapping, changed), items[-1]]

    def _rule(self, name: str, mapping: Mapping, changed: Facts) -> str:
        """The first rule of a name whose condition holds."""
        for rule in self.rules.get(name, ()):
            query = _query(rule.condition) if rule.condition else []
            if any(True for _ in self._answers(query, mapping, changed)):
                return self._write(rule.rhs, mapping, changed)
        raise ValueError(f"the grammar's `{name}` has no rule that applies here")

    def _value(self, expression: str, mapping: Mapping) -> str:
        """`o.indefinite + ' ' + o.name`, say, computed once for each choice of its variables."""
        chosen = {placeholder: name for (placeholder, _), (name, _) in mapping.items()}
        key = (expression, *[chosen.get(word) for word in words(expression)])
        if key not in self._values:
            variables = {placeholder: self.entities[name] for placeholder, name in chosen.items()}
            self._values[key] = str(_computed(ast.parse(expression, mode="eval").body, variables))
        return self._values[key]

    def _answers(self, query: list, mapping: Mapping, changed: Facts, depth: int = 0) -> Iterator[Mapping]:
        """All mappings that make a conjunction true, in TextWorld's order: by type signature, then by name;
        two placeholders never share a thing."""
        if depth == len(query):
            yield mapping
            return
        predicate, types, placeholders = query[depth]
        bound = [mapping.get(placeholder) for placeholder in placeholders]
        for signature in self._subtypes(predicate, types):
            rows = changed.get(signature)
            if rows is None:
                rows = self.first_facts.get(signature, ())
            kinds = signature[1]
            if None not in bound:
                names = tuple([name for name, _ in bound])
                if names in rows and kinds == tuple([kind for _, kind in bound]):
                    yield from self._answers(query, mapping, changed, depth + 1)
                continue
            fits = [row for row in rows
                    if all([b is None or b == thing for b, thing in zip(bound, zip(row, kinds))])]
            for row in sorted(fits):
                answer = _bind(mapping, placeholders, zip(row, kinds))
                if answer is not None:
                    yield from self._answers(query, answer, changed, depth + 1)

    def _subtypes(self, predicate: str, types: tuple[str, ...]) -> list[Signature]:
        if (predicate, types) not in self._signatures:
            found = self.hierarchy.multi_subtypes([self.hierarchy.get(name) for name in types])
            self._signatures[predicate, types] = [(predicate, tuple(t.name for t in row)) for row in found]
        return self._signatures[predicate, types]


def _bind(mapping: Mapping, placeholders: list, things: Iterator) -> Mapping | None:
    answer, used = dict(mapping), set(mapping.values())
    for placeholder, thing in zip(placeholders, things):
        if placeholder not in answer and thing not in used:
            answer[placeholder] = thing
            used.add(thing)
        elif answer.get(placeholder) != thing:
            return None
    return answer
