"""Faults in security: a missing check of input, owner, lease, token or file mode."""

from __future__ import annotations

from tests.faults.fault import Fault

SCHEMAS = "tests/rules/durable/test_schema_limits.py"
OWNED_IDS = "tests/scenarios/execution/test_owned_ids.py"
OWNED_LIMITS = "tests/scenarios/limits/test_owned_limits.py"
HOLDER = "tests/scenarios/execution/test_holder.py"
TAGS = "tests/scenarios/execution/test_reserved_tags.py"
HANDLES = "tests/server/routes/test_handles.py"
EDGE = "tests/server/test_request_checks.py"
READMISSION = "tests/server/test_readmission.py"
PRIVATE = "tests/stores/sqlite/test_permissions.py"

SECURITY = (
    # Schemas from outside, and the cost of reading them.
    Fault(
        "a pattern from outside is matched by a backtracking engine",
        "rules/durable/json_schema.py",
        "            yield from _format_violations(value, schema, name)\n",
        "            yield from _format_violations(value, schema, name)\n"
        '            if "pattern" in schema and not __import__("re").search(schema["pattern"], value[-9:]):\n'
        '                yield f"{name}: does not match"\n',
        f"{SCHEMAS}::test_a_pattern_is_left_to_the_run",
    ),
    Fault(
        "the check of a value has no bound of steps",
        "rules/durable/json_schema.py",
        "        if self.steps > self._max_steps:\n",
        "        if self.steps > 4 * self._max_steps:\n",
        f"{SCHEMAS}::test_a_stored_schema_costs_a_bounded_number_of_steps",
    ),
    Fault(
        "a schema of any number of bytes is accepted",
        "rules/durable/schema_limits.py",
        "    if size > MAX_BYTES:\n",
        "    if False:\n",
        f"{SCHEMAS}::test_a_schema_beyond_the_bounds_is_refused_in_a_tag",
    ),
    Fault(
        "a schema of any number of nodes is accepted",
        "rules/durable/schema_limits.py",
        "        if nodes > MAX_NODES:\n",
        "        if False:\n",
        f"{SCHEMAS}::test_a_schema_beyond_the_bounds_is_refused_in_a_tag",
    ),
    Fault(
        "a schema of any depth is accepted",
        "rules/durable/schema_limits.py",
        "        if depth > MAX_DEPTH:\n",
        "        if False:\n",
        f"{SCHEMAS}::test_a_schema_beyond_the_bounds_is_refused_in_a_tag",
    ),
    Fault(
        "references in a schema expand without bound",
        "rules/durable/schema_limits.py",
        "        if expanded > MAX_EXPANDED:\n",
        "        if expanded > 4 * MAX_EXPANDED:\n",
        f"{SCHEMAS}::test_a_schema_beyond_the_bounds_is_refused_in_a_tag",
    ),
    Fault(
        "a schema in a tag is not validated",
        "rules/execution/tags.py",
        "        if key.startswith(schema_limits.SCHEMA_TAG_PREFIX) and (invalid := schema_limits.check_schema(value)):\n",
        "        if False:\n",
        "tests/server/routes/test_approval_json.py::test_a_schema_out_of_bounds_is_refused_by_every_route",
    ),
    Fault(
        "a form has as many fields as its schema",
        "server/approval_form.py",
        "        if self._fields > MAX_FIELDS or self._options > MAX_OPTIONS:\n",
        "        if False:\n",
        f"{SCHEMAS}::test_a_form_stays_small_whatever_the_schema",
    ),
    # Ids of other namespaces.
    Fault(
        "a flow of another namespace counts as an own flow",
        "rules/flow/build.py",
        "        if existing.namespace != namespace:\n",
        "        if False:\n",
        f"{OWNED_IDS}::test_creating_a_flow_whose_id_exists_in_another_namespace_is_a_conflict",
    ),
    Fault(
        "an execution of another namespace becomes a member of a flow",
        "rules/flow/build.py",
        "    if row.namespace != flow.namespace:\n",
        "    if False:\n",
        f"{OWNED_IDS}::test_an_execution_of_another_namespace_cannot_join_a_flow",
    ),
    Fault(
        "a graph is satisfied by a flow of another namespace",
        "rules/flow/graph.py",
        "        if flow.namespace != request.namespace:\n",
        "        if False:\n",
        f"{OWNED_IDS}::test_creating_a_graph_whose_flow_id_exists_in_another_namespace_is_a_conflict",
    ),
    Fault(
        "a node of a graph is satisfied by an execution of another namespace",
        "rules/flow/graph.py",
        "        if other.namespace != namespaces.get(other.execution_id, request.namespace):\n",
        "        if False:\n",
        f"{OWNED_IDS}::test_a_graph_with_a_node_of_another_namespace_creates_nothing",
    ),
    Fault(
        "a run's result is read from an execution of another namespace",
        "sdk/run.py",
        "        if None not in (self._namespace, outcome.namespace) and self._namespace != outcome.namespace:\n",
        "        if False:\n",
        "tests/sdk/test_owned_ids.py::test_the_result_of_a_node_that_another_namespace_occupies_is_refused",
    ),
    Fault(
        "a node reads its input from an execution of another namespace",
        "sdk/serialization/inputs.py",
        "tuple(dict.fromkeys(run_ids)), namespace=namespace)",
        "tuple(dict.fromkeys(run_ids)))",
        "tests/sdk/test_owned_ids.py::test_a_node_does_not_read_the_result_of_another_namespace",
    ),
    # Budgets and quotas of other namespaces.
    Fault(
        "an id in a policy names the shared budget although the namespace has its own",
        "rules/limits/owner.py",
        "    if own.is_shared or is_defined(roots.get(own)) or not is_defined(roots.get(own.shared)):\n",
        "    if own.is_shared or not is_defined(roots.get(own.shared)):\n",
        f"{OWNED_LIMITS}::test_an_execution_spends_from_its_own_budget_before_the_shared_one",
    ),
    Fault(
        "a bound token names the budget of any namespace",
        "server/request.py",
        "        namespace = only if given is None else given\n        self.require_namespace(namespace)\n",
        "        namespace = only if given is None else given\n",
        "tests/server/routes/test_owned_limits.py::test_a_bound_token_reaches_no_budget_of_another_namespace",
    ),
    Fault(
        "a bound worker spends in the shared budgets",
        "server/request.py",
        "        return self.principal.namespaces is None\n",
        "        return True\n",
        "tests/server/routes/test_owned_limits.py"
        "::test_a_bound_worker_spends_reserves_and_refunds_in_the_namespace_of_its_work",
    ),
    # Handles: the lease, the signature, the budget's verbs.
    Fault(
        "any handle cancels an execution that is not active",
        "rules/execution/cancel.py",
        "    if not is_last or not lease.has_open_attempt(row):\n",
        "    if False:\n",
        f"{HOLDER}::test_a_forged_handle_cannot_cancel",
    ),
    Fault(
        "a handle of an ended attempt cancels a replay",
        "rules/execution/cancel.py",
        " or not lease.has_open_attempt(row):",
        ":",
        f"{HANDLES}::test_a_handle_of_a_former_life_does_not_cancel_a_replay",
    ),
    Fault(
        "a holder's cancel is not audited",
        "server/routes/leases.py",
        '@lease_route("cancel", one_of(answers.Cancelled), HolderCancelRequest, audit=True)',
        '@lease_route("cancel", one_of(answers.Cancelled), HolderCancelRequest)',
        f"{HANDLES}::test_a_holders_cancel_is_audited_with_its_execution",
    ),
    Fault(
        "usage is reported without the lease",
        "server/routes/lease_usage.py",
        "    body = request.body\n    await request.engine.require_lease(request.handle)\n    return variant_response(\n        await request.engine.report_usage(\n            ",
        "    body = request.body\n    return variant_response(\n        await request.engine.report_usage(",
        f"{HANDLES}::test_an_expired_lease_cannot_use_a_budget",
    ),
    Fault(
        "money is spent without the lease",
        "server/routes/lease_usage.py",
        "    await request.engine.require_lease(handle)\n    return variant_response(\n        await request.engine.record_spend(\n            ",
        "    return variant_response(\n        await request.engine.record_spend(",
        f"{HANDLES}::test_an_expired_lease_cannot_use_a_budget",
    ),
    Fault(
        "budget is reserved without the lease",
        "server/routes/lease_usage.py",
        "    await request.engine.require_lease(handle)\n    return variant_response(\n        await request.engine.reserve_budget(\n            ",
        "    return variant_response(\n        await request.engine.reserve_budget(",
        f"{HANDLES}::test_an_expired_lease_cannot_use_a_budget",
    ),
    Fault(
        "a reservation is refunded without the lease",
        "server/routes/lease_usage.py",
        "    await request.engine.require_lease(request.handle)\n    body, execution_id",
        "    body, execution_id",
        f"{HANDLES}::test_an_expired_lease_cannot_use_a_budget",
    ),
    Fault(
        "a holder refunds the reservation of another execution",
        "rules/limits/reservation.py",
        "    if execution_id is not None and (refused := _check_owner(own_rows, execution_id)):\n",
        "    if execution_id is None and (refused := _check_owner(own_rows, execution_id or '')):\n",
        f"{HANDLES}::test_a_refund_is_refused_for_a_reservation_of_another_execution",
    ),
    Fault(
        "a server accepts any signature of a handle",
        "server/handle_signer.py",
        "            answers[index] = errors.Corruption(HANDLE_NOT_OURS)\n",
        "            pass\n",
        f"{HANDLES}::test_a_handle_cannot_be_built_from_its_readable_parts",
    ),
    Fault(
        "the kind of a handle can be altered",
        "rules/security/signed_handle.py",
        '    return handle.kind.value.encode() + b"\\0" + handle.opaque\n',
        "    return handle.opaque\n",
        f"{HANDLES}::test_the_kind_of_a_handle_is_signed",
    ),
    # Reserved tags.
    Fault(
        "a batch of tags may contain reserved ones",
        "rules/execution/tags.py",
        "        if not allow_reserved and is_reserved(key):\n",
        "        if False:\n",
        f"{TAGS}::test_a_reserved_tag_cannot_be_set_without_the_lease",
    ),
    Fault(
        "a single tag may be a reserved one",
        "rules/execution/tags.py",
        "    return _reserved_key_error(key) if is_reserved(key) else None\n",
        "    return None\n",
        f"{TAGS}::test_the_tags_of_a_flow_are_bounded_and_reserved_tags_are_refused",
    ),
    Fault(
        "a caller sets the trace context of an execution",
        "server/routes/executions.py",
        "    if tracing.TRACEPARENT_TAG in body.tags:",
        "    if False:",
        "tests/server/routes/test_reserved_tags.py::test_a_create_with_a_reserved_tag_is_refused",
    ),
    Fault(
        "tags grow without bound, one call after the other",
        "rules/execution/tags.py",
        "    if too_large := check_tags_size(merged):\n",
        "    if too_large := None:\n",
        f"{TAGS}::test_the_tags_of_an_execution_are_bounded_in_bytes",
    ),
    Fault(
        "a create carries tags of any size",
        "rules/execution/tags.py",
        "    return check_tags(checked) or check_tags_size(tags)\n",
        "    return check_tags(checked)\n",
        f"{TAGS}::test_the_tags_of_an_execution_are_bounded_in_bytes",
    ),
    # Expired tokens, rates, sizes.
    Fault(
        "a feed continues although its token was revoked",
        "server/request.py",
        "                await self.check_authentication(after_s=0)\n",
        "                pass\n",
        f"{READMISSION}::test_a_feed_ends_when_its_token_is_revoked",
    ),
    Fault(
        "a token is checked again too late",
        "server/app.py",
        "REAUTHENTICATE_S = 10.0",
        "REAUTHENTICATE_S = 15.0",
        f"{READMISSION}::test_a_token_is_checked_again_within_fifteen_seconds",
    ),
    Fault(
        "a token may open any number of feeds",
        "server/auth.py",
        "        if self._limit and self._open[name] >= self._limit:\n",
        "        if False:\n",
        f"{READMISSION}::test_the_number_of_feeds_per_token_is_limited",
    ),
    Fault(
        "the OpenAPI document is built for each request",
        "server/app.py",
        "    @cached_property\n    def openapi",
        "    @property\n    def openapi",
        f"{EDGE}::test_the_openapi_document_is_built_once",
    ),
    Fault(
        "numbers of any length are decoded",
        "json_limits.py",
        "            raise NumberTooLong()\n",
        "            return\n",
        f"{EDGE}::test_every_route_refuses_long_numbers_and_deep_json",
    ),
    Fault(
        "a response contains any number of bytes of results",
        "server/routes/queries.py",
        "            if results and size > MAX_RESULT_BYTES:\n",
        "            if False:\n",
        "tests/server/routes/test_results.py::test_a_response_is_bounded_and_lists_the_remaining_ids",
    ),
    Fault(
        "wrong tokens are not rate limited",
        "server/auth.py",
        "            self._cache.pop(digest, None)\n            self._rate.acquire(failure_key)\n",
        "            self._cache.pop(digest, None)\n",
        f"{EDGE}::test_wrong_tokens_are_rate_limited_by_address_and_a_valid_one_is_not",
    ),
    Fault(
        "routes without a token are not rate limited",
        "server/app.py",
        '                self._rate.acquire(f"{resource.template} from {request.client_address}")\n',
        "                pass\n",
        f"{EDGE}::test_routes_without_a_token_are_rate_limited_by_address",
    ),
    Fault(
        "connections have no limit",
        "server/connection_limits.py",
        "            self.app = refuse_connection\n",
        "            pass\n",
        "tests/server/test_limits.py::test_connections_above_the_limit_are_refused_and_open_ones_continue",
    ),
    # SQLite files, the name of a server, its edge.
    Fault(
        "a new database is readable by others",
        "stores/sqlite/permissions.py",
        "target, _OWNER | stat.S_IFREG",
        "                target, 0o644 | stat.S_IFREG\n",
        f"{PRIVATE}::test_every_created_file_is_accessible_to_its_user_only",
    ),
    Fault(
        "the lock file of another user is used",
        "stores/sqlite/permissions.py",
        "    if not _is_trusted(found, root):\n        return False\n",
        "",
        f"{PRIVATE}::test_a_lock_file_of_a_foreign_user_is_refused",
    ),
    Fault(
        "a write waits for the lock without a timeout",
        "stores/sqlite/connection_thread.py",
        "                job.fail_if_unstarted()\n",
        "                pass\n",
        f"{PRIVATE}::test_waiting_for_the_write_lock_is_bounded_and_an_abandoned_change_is_never_written",
    ),
    Fault(
        "a server without a token accepts any host",
        "server/origin_policy.py",
        "        if not self._is_on or ",
        "        if True or ",
        f"{EDGE}::test_a_server_without_a_token_refuses_a_foreign_host",
    ),
    Fault(
        "the last of two Authorization headers is used",
        "server/app.py",
        'sum(name == b"authorization" for name, _ in headers) > 1:',
        "False:",
        f"{EDGE}::test_two_authorization_headers_are_refused",
    ),
    Fault(
        "an Idempotency-Key matches another body",
        "server/idempotency.py",
        "    if known != content:\n",
        "    if False:\n",
        f"{EDGE}::test_an_idempotency_key_with_another_request_is_a_conflict",
    ),
    Fault(
        "a signing secret of a few bytes is installed",
        "rules/security/keystore.py",
        "    if len(secret_hex) < _MIN_HEX_DIGITS:  #",
        "    if False:  #",
        "tests/rules/security/test_keystore.py",
    ),
    Fault(
        "a rotation accepts a signing secret of a few bytes",
        "rules/security/keystore.py",
        "    if len(secret_hex) < _MIN_HEX_DIGITS:\n",
        "    if False:\n",
        "tests/rules/security/test_keystore.py",
    ),
    Fault(
        "a grant is redeemed without the key that was issued with it",
        "rules/execution/grant.py",
        "    if proof is not None and not proof.covers(grant, now):\n",
        "    if False:\n",
        f"{HANDLES}::test_a_grant_is_redeemed_only_with_the_key_that_was_issued",
    ),
    Fault(
        "a lost attempt is taken over without the key that was issued with its grant",
        "rules/execution/reclaim.py",
        "    if proof is not None and not proof.covers(grant, now):\n",
        "    if False:\n",
        f"{HANDLES}::test_a_grant_is_redeemed_only_with_the_key_that_was_issued",
    ),
    Fault(
        "deep JSON in a form fails its page",
        "server/approval_form.py",
        "    except (ValueError, RecursionError):\n        raise InvalidFormInput",
        "    except ValueError:\n        raise InvalidFormInput",
        "tests/server/routes/test_approval_json.py::test_no_stored_schema_makes_a_page_or_a_vote_fail",
    ),
    Fault(
        "deep JSON in the show tag of an approval fails its page",
        "server/routes/approval_pages.py",
        "json_limits.decode(text)\n    except (msgspec.DecodeError, RecursionError):\n",
        "json_limits.decode(text)\n    except msgspec.DecodeError:\n",
        "tests/server/routes/test_approval_json.py::test_no_stored_show_tag_makes_a_page_fail",
    ),
)
