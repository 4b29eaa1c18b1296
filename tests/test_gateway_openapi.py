"""The OpenAPI page: schemathesis takes it at its word and asks everything it allows, and more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from common.settings import Settings
from services.gateway.app import make_app
from services.pool.local import LocalPool
from tests.gateway_server import Http, end_of, gateway, push

KEY = "sk-schemathesis-0123456789"
LOCKED = Settings(noop="0", http_keys=f"schemathesis {KEY}", http_wait_s=10)
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 20  # of each operation
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def http() -> Iterator[Http]:
    with (
        LocalPool(settings=LOCKED) as pool,
        gateway(pool) as client,
    ):
        client.headers.update(AUTHORIZED)
        yield client


@pytest.fixture(scope="module")
def made(http: Http) -> str:
    """A job that has ended, for the paths that name one."""
    return str(end_of(http, push(http))["id"])


schema = schemathesis.openapi.from_dict(make_app(LOCKED).openapi())


@schema.parametrize()
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_every_answer_is_documented_and_none_is_an_accident(
    case: Any, http: Http, made: str
) -> None:
    url = str(http.base_url)
    case.call_and_validate(base_url=url, checks=CHECKS, headers=AUTHORIZED)
    if "job_id" in (case.path_parameters or {}):
        case.path_parameters["job_id"] = made
        case.call_and_validate(base_url=url, checks=CHECKS, headers=AUTHORIZED)
    case.call_and_validate(base_url=url, checks=CHECKS)  # without a key


def test_every_operation_has_an_example_that_works(http: Http) -> None:
    """What the page shows as an example is taken by a pool, as far as its model knows it."""
    page = http.get("/openapi.json").json()
    tried = set()
    for path in ("/v1/jobs", "/v1/images/generations"):
        body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        answer: httpx.Response = http.post(path, json=body["example"])
        assert answer.is_success, answer.text
        tried.add(path)
    assert tried < set(page["paths"])
    assert "422" not in page["paths"]["/v1/jobs/{job_id}"]["get"]["responses"]
