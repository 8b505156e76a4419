"""The planning service: an HTTP API, the workers that plan, and a page that shows the answer.

    wire        what is sent and answered, as pydantic models: no other module reads JSON bodies
    settings    every limit and default, by name
    store/      jobs, plans, keys and events in SQLite or PostgreSQL
    worker/     processes that claim jobs and plan; the only part that loads torch
    routes/     one file for each kind of resource
    app         the FastAPI application: routes, problems, keys, limits, metrics
    page/       the page at /, as static files

Imports point one way: app -> routes -> store -> settings, wire; worker -> store. The server's own
process never imports torch and never plans.
"""
