"""Capitals: a fact that a model has to remember.

    The capital of Austria is the city of  ->  " Vienna"

The corrupt prompt names another country whose name has equally many tokens (corruption "country"); its capital is the
wrong answer. Countries whose capital is disputed, moving, two cities, or holds the country's name are left out, and
those that need an article. Labels: country (its last token), end.

The first template is that of AutoCircuit's data set; the others and the list are our own.
"""

from clearhead.data import templates
from clearhead.data.task_item import TaskItem
from clearhead.data.templates import Lot
from clearhead.model.access import Model

TEMPLATES = (
    "The capital of {country} is the city of",
    "If you travel to the capital of {country}, you will arrive in",
    "Everybody at school learns that the capital of {country} is",
    "Question: What is the capital of {country}? Answer: The capital of {country} is",
    "The government of {country} sits in the capital city of",
    "She moved to {country} last year and now lives in its capital,",
)
CAPITALS = {
    "Afghanistan": "Kabul",
    "Albania": "Tirana",
    "Algeria": "Algiers",
    "Angola": "Luanda",
    "Argentina": "Buenos Aires",
    "Armenia": "Yerevan",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Azerbaijan": "Baku",
    "Bangladesh": "Dhaka",
    "Belgium": "Brussels",
    "Bulgaria": "Sofia",
    "Cambodia": "Phnom Penh",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogotá",
    "Croatia": "Zagreb",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Ecuador": "Quito",
    "Egypt": "Cairo",
    "Estonia": "Tallinn",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Georgia": "Tbilisi",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Jordan": "Amman",
    "Kenya": "Nairobi",
    "Latvia": "Riga",
    "Lebanon": "Beirut",
    "Libya": "Tripoli",
    "Lithuania": "Vilnius",
    "Mongolia": "Ulaanbaatar",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Nigeria": "Abuja",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Qatar": "Doha",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Saudi Arabia": "Riyadh",
    "Senegal": "Dakar",
    "Serbia": "Belgrade",
    "Slovakia": "Bratislava",
    "Slovenia": "Ljubljana",
    "Somalia": "Mogadishu",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Syria": "Damascus",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Uganda": "Kampala",
    "Ukraine": "Kyiv",
    "Uruguay": "Montevideo",
    "Venezuela": "Caracas",
    "Vietnam": "Hanoi",
    "Zambia": "Lusaka",
    "Zimbabwe": "Harare",
}
CORRUPTIONS = ("country",)
COUNTRY_DRAW = 0


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items. Raises `UnknownNameError` for another corruption, `ClearheadError` where the tokenizer takes none."""
    templates.chosen("capitals", corrupt, CORRUPTIONS)

    def make(lot: Lot) -> TaskItem:
        template = lot.turn(TEMPLATES)
        country, other, *_ = lot.shuffled(COUNTRY_DRAW, list(CAPITALS))
        return templates.fill(
            model,
            template,
            {"country": country},
            {"country": other},
            name=f"capitals {TEMPLATES.index(template)}",
            answers=[f" {CAPITALS[country]}"],
            wrong_answers=[f" {CAPITALS[other]}"],
            labels=["country"],
        )

    return templates.generate("capitals", model, n, seed, make)
