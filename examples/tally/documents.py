"""Purchase documents with the reasoning and the answer a model should give; pure Python, seeded.

Reasoning has a line for each item, digits from low to high, every carry written:

    A:3*04.50 3*0=00+0+0=00 3*5=15+0+0=15 3*4=12+0+1=13 3*0=00+0+1=01

A step is `quantity*digit=product+digit of the total+carry=new carry and digit of the total`. A
discount is taken off by adding nines' complements to a first carry of 1:

    -:1*01.50 9-0=09+0+1=10 9-5=04+5+1=10 9-1=08+3+1=12 9-0=09+1+1=11

All lines have as many tokens and a digit of the total always stands one line above the one that
needs it. The total closes the reasoning: `=12.00`.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.tally import wording
from examples.tally.wording import draw_word, is_reserved, price_key, sum_key

MAX_TOTAL_CENTS = 9_999
LEAST_ITEM_CENTS = 600
MAX_DRAWS = 300
MAX_ITEMS = 6
ITEM_COUNT_WEIGHTS = (24, 28, 22, 14, 8, 4)

DrawWord = Callable[[bool], str]
"""Draws a word, an English noun if told so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a purchase."""

    name: str
    quantity: int
    price_cents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document, its worked solution and what it was made of."""

    text: str
    reasoning: str
    answer: str
    vendor: str
    items: tuple[Item, ...]
    discount_cents: int
    wording_key: str
    words: tuple[str, ...]


def training_documents(seed: int, max_items: int = MAX_ITEMS) -> Iterator[Document]:
    """Yield endless documents that hold nothing reserved."""
    rng = random.Random(f"tally-train-{seed}")
    while True:
        yield make_document(rng, heldout=False, max_items=max_items)


def heldout_documents(seed: int, n: int) -> Iterator[Document]:
    """Yield `n` documents whose names, wording combination and number pairs are all reserved."""
    rng = random.Random(f"tally-heldout-{seed}")
    for _ in range(n):
        yield make_document(rng, heldout=True)


def make_document(rng: random.Random, heldout: bool, max_items: int = MAX_ITEMS) -> Document:
    """Draw one document from one side of the split."""
    words: list[str] = []

    def draw(nouns: bool) -> str:
        words.append(draw_word(rng, heldout, nouns))
        return words[-1]

    num_items = rng.choices(range(1, max_items + 1), ITEM_COUNT_WEIGHTS[:max_items])[0]
    items, discount_cents = draw_numbers(rng, heldout, num_items)
    named = tuple(
        Item(name=fill(rng.choice(wording.ITEM_FORMS), draw), quantity=q, price_cents=p)
        for q, p in items
    )
    vendor = fill(rng.choice(wording.VENDOR_FORMS), draw, capitalise=True)
    choice = draw_wording(rng, heldout, discount_cents > 0)
    text = write_text(rng, choice, vendor, named, discount_cents, draw)
    reasoning, total_cents = write_reasoning(items, discount_cents)
    return Document(
        text=text,
        reasoning=reasoning,
        answer=write_answer(num_items, discount_cents, total_cents),
        vendor=vendor,
        items=named,
        discount_cents=discount_cents,
        wording_key=choice.key(),
        words=tuple(words),
    )


def draw_item(rng: random.Random) -> tuple[int, int]:
    """Draw a quantity and a unit price of two to four digits of cents."""
    price = rng.randint(50, 999) if rng.random() < 0.7 else rng.randint(1000, 3999)
    return rng.randint(1, 9), price


def draw_numbers(
    rng: random.Random, heldout: bool, num_items: int
) -> tuple[list[tuple[int, int]], int]:
    """Draw quantities, unit prices and a discount (0: none), every pair from the wanted side."""
    while True:
        items: list[tuple[int, int]] = []
        total_cents = 0
        for left in reversed(range(num_items)):
            highest = MAX_TOTAL_CENTS - LEAST_ITEM_CENTS * left
            item = next(
                (
                    item
                    for item in (draw_item(rng) for _ in range(MAX_DRAWS))
                    if _item_fits(*item, total_cents, highest, heldout)
                ),
                None,
            )
            if item is None:
                break
            items.append(item)
            total_cents += item[0] * item[1]
        if len(items) < num_items:
            continue
        if rng.random() < 0.5:
            return items, 0
        for _ in range(MAX_DRAWS):
            discount = rng.randint(20, 1499)
            key = sum_key(total_cents, -discount)
            if discount < total_cents and is_reserved(key) == heldout:
                return items, discount


def _item_fits(quantity: int, price: int, total_cents: int, highest: int, heldout: bool) -> bool:
    amount = quantity * price
    if total_cents + amount > highest or is_reserved(price_key(quantity, price)) != heldout:
        return False
    return total_cents == 0 or is_reserved(sum_key(total_cents, amount)) == heldout


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Which phrase of each list a document uses."""

    kind: str
    header: int
    line: int
    marker: int
    joiner: int
    money: int
    discount: int | None
    footer: int
    note: int | None
    note_first: bool

    def key(self) -> str:
        """Give the key under which the combination of phrases is reserved."""
        phrases = (self.kind, self.header, self.line, self.marker, self.joiner, self.money)
        return f"wording {phrases} {self.discount} {self.footer} {self.note}"


def draw_wording(rng: random.Random, heldout: bool, has_discount: bool) -> Wording:
    """Draw a combination of phrases from the wanted side of the split."""
    while True:
        kind = rng.choice(tuple(wording.HEADERS))
        is_prose = kind == "mail" and rng.random() < 0.5
        choice = Wording(
            kind=kind,
            header=rng.randrange(len(wording.HEADERS[kind])),
            line=rng.choice(wording.PROSE_LINES)
            if is_prose
            else rng.randrange(len(wording.ITEM_LINES)),
            marker=rng.choice(wording.PROSE_MARKERS)
            if is_prose
            else rng.randrange(len(wording.MARKERS)),
            joiner=rng.choice((1, 2)) if is_prose else 0,
            money=rng.choice((0, 0, 0, 1, 2, 3)),
            discount=rng.randrange(len(wording.DISCOUNTS)) if has_discount else None,
            footer=rng.randrange(len(wording.FOOTERS)),
            note=rng.randrange(len(wording.NOTES)) if rng.random() < 0.5 else None,
            note_first=rng.random() < 0.5,
        )
        if is_reserved(choice.key()) == heldout:
            return choice


def fill(form: str, draw: DrawWord, capitalise: bool = False) -> str:
    """Fill a name form: `w`, `v` are invented words, `n`, `m` nouns."""
    result = form
    for letter in "wvnm":
        while "{" + letter + "}" in result:
            word = draw(letter in "nm")
            word = word.capitalize() if capitalise else word
            result = result.replace("{" + letter + "}", word, 1)
    return result


def money(cents: int) -> str:
    """Write cents as units and cents: 450 is `4.50`."""
    return f"{cents // 100}.{cents % 100:02d}"


def write_text(
    rng: random.Random,
    choice: Wording,
    vendor: str,
    items: tuple[Item, ...],
    discount_cents: int,
    draw: DrawWord,
) -> str:
    """Write the document in the chosen wording."""

    def phrase(form: str) -> str:
        for digits in range(1, 6):
            while "{n" + str(digits) + "}" in form:
                number = rng.randint(10 ** (digits - 1), 10**digits - 1)
                form = form.replace("{n" + str(digits) + "}", str(number), 1)
        if "{who}" in form:
            form = form.replace("{who}", draw(False).capitalize())
        return form.replace("{money}", money(rng.randint(10, 199) * 50))

    line = wording.MARKERS[choice.marker] + wording.ITEM_LINES[choice.line]
    price = wording.MONEY[choice.money]
    lines = [
        line.format(
            i=label, q=item.quantity, name=item.name, p=price.format(p=money(item.price_cents))
        )
        for label, item in zip(wording.LABELS, items, strict=False)
    ]
    parts = [phrase(wording.HEADERS[choice.kind][choice.header]).replace("{vendor}", vendor)]
    note = None if choice.note is None else phrase(wording.NOTES[choice.note])
    if note is not None and choice.note_first:
        parts.insert(rng.choice((0, 0, 1)), note)
    joiner = wording.JOINERS[choice.joiner]
    parts.append(joiner.join(lines) + ("." if choice.joiner else ""))
    if choice.discount is not None:
        amount = price.format(p=money(discount_cents))
        parts.append(wording.DISCOUNTS[choice.discount].format(d=amount))
    if note is not None and not choice.note_first:
        parts.append(note)
    footer = phrase(wording.FOOTERS[choice.footer])
    return "\n".join([*parts, footer] if footer else parts)


def write_reasoning(items: list[tuple[int, int]], discount_cents: int) -> tuple[str, int]:
    """Write the worked solution; return it and the total in cents."""
    total = [0] * 4
    lines = []
    for label, (quantity, price) in zip(wording.LABELS, items, strict=False):
        steps, carry = [], 0
        for place in range(4):
            digit = price // 10**place % 10
            product = quantity * digit
            value = product + total[place] + carry
            steps.append(f"{quantity}*{digit}={product:02d}+{total[place]}+{carry}={value:02d}")
            carry, total[place] = divmod(value, 10)
        lines.append(f"{label}:{quantity}*{price // 100:02d}.{price % 100:02d} " + " ".join(steps))
    if discount_cents:
        lines.append(_write_discount(total, discount_cents))
    digits = "".join(str(digit) for digit in reversed(total))
    lines.append(f"={digits[:2]}.{digits[2:]}")
    return "\n".join(lines) + "\n", int(digits)


def _write_discount(total: list[int], discount_cents: int) -> str:
    steps, carry = [], 1
    for place in range(4):
        digit = discount_cents // 10**place % 10
        value = 9 - digit + total[place] + carry
        steps.append(f"9-{digit}={9 - digit:02d}+{total[place]}+{carry}={value:02d}")
        carry, total[place] = divmod(value, 10)
    return f"-:1*{discount_cents // 100:02d}.{discount_cents % 100:02d} " + " ".join(steps)


def write_answer(num_items: int, discount_cents: int, total_cents: int) -> str:
    """Write the one line of JSON that follows the reasoning."""
    return (
        f'{{"items": {num_items}, "discount": "{money(discount_cents)}", '
        f'"total": "{money(total_cents)}"}}'
    )
