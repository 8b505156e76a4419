"""Plans, graphs and validations for people: tables for a terminal, fragments for a notebook."""

from autoshard.render.front import front_sections, front_table
from autoshard.render.graph import graph_sections, graph_table
from autoshard.render.html import plan_html, sections_html
from autoshard.render.plan import plan_sections, plan_table
from autoshard.render.sections import Section, render_text
from autoshard.render.validation import validation_sections, validation_table
from autoshard.render.what_if import what_if_sections, what_if_table
from autoshard.render.why_not import (
    explanation_sections,
    explanation_table,
    why_not_sections,
    why_not_table,
)

__all__ = [
    "Section",
    "explanation_sections",
    "explanation_table",
    "front_sections",
    "front_table",
    "graph_sections",
    "graph_table",
    "plan_html",
    "plan_sections",
    "plan_table",
    "render_text",
    "sections_html",
    "validation_sections",
    "validation_table",
    "what_if_sections",
    "what_if_table",
    "why_not_sections",
    "why_not_table",
]
