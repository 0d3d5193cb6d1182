"""The words and phrases of the purchase documents, and which of them training may use.

A word of a name, a wording combination or a number pair is *reserved* when a checksum of it falls
in one class. The training generator draws again until nothing is reserved; the held-out generator
draws again until everything is. The two are therefore disjoint by construction, not by sampling.
"""

import random
import zlib

RESERVED_SHARE = 5
"""One value in this many is reserved for held-out documents."""

ONSET_TEXT = """
b br ch d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sp st t th tr v w y z
"""
VOWEL_TEXT = "a e i o u ai ea ee ie oa oo ou"
CODA_TEXT = "b ck d g l ll m mp n nd ng nt p r rk s sk st t x"
ONSETS = tuple(ONSET_TEXT.split())
VOWELS = tuple(VOWEL_TEXT.split())
CODAS = ("", "", "", *CODA_TEXT.split())
NOUN_TEXT = """
apron bag basket battery bean belt bench bicycle binder blanket bolt book bottle bowl box
bracket bread broom brush bucket bulb butter button cable cake candle carpet chair charger
cheese chisel clamp clock cloth coat coffee comb cookie cup curtain cushion desk drill
envelope eraser fan file filter flour folder fork frame funnel garlic glove glue hammer hat
helmet hinge honey hook hose ink jacket jam jar juice kettle keyboard knife label ladder lamp
lemon lid lock map marker mat milk mirror monitor mop mouse mug nail napkin needle notebook
oil onion oven paint pan paper pasta pencil pepper pillow pipe plate pliers plug poster pot
printer pump rack radio rake razor rice ring rope rug ruler sack salt saw scale scarf screw
seed shelf shirt shoe shovel sieve soap sock sofa spade sponge spoon stamp stapler stool
string sugar switch table tape tea tent tile towel tray umbrella valve vase wallet washer
whisk wire wrench yarn
"""
NOUNS = tuple(NOUN_TEXT.split())
VENDOR_FORMS = (
    "{w}",
    "{w} Market",
    "{w} & Sons",
    "{w} Supplies",
    "The {w} Store",
    "{w} Ltd",
    "{w} and {v}",
    "Bakery {w}",
    "{w} Tools",
)
ITEM_FORMS = ("{n}", "{n}", "{w} {n}", "{w} {n}", "{n} {w}", "{w}", "{n} and {m} set", "{w} {v}")

HEADERS = {
    "receipt": (
        "{vendor}\nReceipt",
        "RECEIPT\n{vendor}",
        "Thank you for shopping at {vendor}!",
        "{vendor}, sales slip",
        "{vendor}\nYour purchase today:",
        "Welcome to {vendor}",
    ),
    "mail": (
        "Hi {vendor} team,\nplease send us:",
        "Dear {vendor},\nwe would like to order:",
        "Hello,\nthis is my order from {vendor}:",
        "To: {vendor}\nPlease deliver the following.",
        "Subject: order at {vendor}\nWe need",
        "Hello {vendor}, kindly ship",
    ),
    "invoice": (
        "Invoice\nFrom: {vendor}",
        "{vendor}\nInvoice for {who}",
        "Bill from {vendor}",
        "{vendor} charges {who} for:",
        "INVOICE\nSeller: {vendor}\nBuyer: {who}",
        "For the goods below, payable to {vendor}:",
    ),
}
ITEM_LINES = (
    "{q} x {name} @ {p}",
    "{q} {name} at {p} each",
    "{q} units of {name}, unit price {p}",
    "{name}: {p} each, qty {q}",
    "{name} ({p}) x{q}",
    "qty {q} | {name} | {p}",
    "{name}, price {p}, quantity {q}",
    "{name}, pcs: {q}, {p} each",
    "{q} pcs {name} for {p} each",
    "{name} | {p} | x{q}",
)
LABELS = "ABDEGH"
MARKERS = ("({i}) ", "[{i}] ", "{i}) ", "{i}: ", "{i}/ ", "{i}. ")
PROSE_LINES = (0, 1, 2, 8)
PROSE_MARKERS = (0, 1)
JOINERS = ("\n", "; ", ", ")
MONEY = ("{p}", "${p}", "{p} EUR", "EUR {p}")
NOTES = (
    "Order no. {n5}",
    "Tel. {n3} {n4}",
    "Table {n1}",
    "Loyalty points: {n3}",
    "Date: {n4}-{n2}-{n2}",
    "Customer {n4}",
    "Served by {who}",
    "Open from {n1} to {n2}",
    "Delivery within {n1} days",
    "Ref {n3}/{n2}",
)
DISCOUNTS = (
    "Discount: -{d}",
    "Coupon -{d}",
    "Voucher used: -{d}",
    "For the returned crate -{d}",
    "You save -{d}",
    "Your rebate: -{d}",
    "Credit applied: -{d}",
)
FOOTERS = (
    "",
    "",
    "Thank you!",
    "Regards, {who}",
    "Please pay within {n2} days.",
    "Cash given: {money}",
    "Last month you spent {money} here.",
    "Card balance: {money}",
    "See you soon, {who}",
    "Goods remain ours until paid.",
)


def is_reserved(key: str) -> bool:
    """Say whether `key` belongs to held-out documents only."""
    return zlib.crc32(f"tally {key}".encode()) % RESERVED_SHARE == 0


def word_key(word: str) -> str:
    """Give the key under which a name's word is reserved."""
    return f"word {word.lower()}"


def price_key(quantity: int, price_cents: int) -> str:
    """Give the key of a quantity and unit price that are multiplied."""
    return f"times {quantity} {price_cents}"


def sum_key(total_cents: int, amount_cents: int) -> str:
    """Give the key of a running total and the amount added to it (negative: taken off)."""
    return f"plus {total_cents} {amount_cents}"


def invent_word(rng: random.Random) -> str:
    """Invent a word of one to three syllables."""
    num_syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(
        rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(num_syllables)
    )


def draw_word(rng: random.Random, heldout: bool, nouns: bool = False) -> str:
    """Draw a word from the wanted side of the split: an English noun or an invented one."""
    while True:
        word = rng.choice(NOUNS) if nouns else invent_word(rng)
        if is_reserved(word_key(word)) == heldout:
            return word
