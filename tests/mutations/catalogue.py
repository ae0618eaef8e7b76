"""Deliberate mutations: plausible bugs in the code that decides about requests, memory and access."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug. `old` is in the file exactly once; `tests` probably detect it and are run first."""

    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SCHEDULER_TESTS = (
    "tests/unit/test_scheduler.py",
    "tests/unit/test_run_ahead.py",
    "tests/property/test_scheduler_properties.py",
)
LEDGER_TESTS = ("tests/unit/test_store.py", "tests/unit/test_store_leases.py", "tests/property/test_store_model.py")
LIFE_CYCLE_TESTS = (
    "tests/unit/test_lifecycle.py",
    "tests/unit/test_dispatch.py",
    "tests/unit/test_void_placements.py",
    "tests/unit/test_surplus_tokens.py",
    "tests/property/test_lifecycle_orders.py",
)

SCHEDULER = (
    Mutation(
        "drafts are looked up in outputs of other tenants",
        "executor/speculation/earlier.py",
        "return tuple(self._outputs[salt])",
        "return tuple(token_id for output in self._outputs.values() for token_id in output)",
        ("tests/unit/test_earlier_outputs.py",),
    ),
    Mutation(
        "drafts take one token more than the sequence may have",
        "executor/scheduler/drafting.py",
        "s.length_limit - len(s.token_ids) - 1)",
        "s.length_limit - len(s.token_ids))",
        ("tests/unit/test_drafting.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a draft counts as accepted though another token was sampled",
        "executor/scheduler/sequence.py",
        "if token_id != draft:",
        "if draft is None:",
        ("tests/unit/test_drafting.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "drafts make a sequence's output indices jump",
        "executor/step/sampling_columns.py",
        "numpy()[yielding.rows] - yielding.num_behind",
        "numpy()[yielding.rows]",
        ("tests/property/test_draft_equality.py",),
    ),
    Mutation(
        "a stop token ends a sequence one token before min_tokens",
        "executor/scheduler/scheduler.py",
        "sequence.num_output_tokens > stopping.min_tokens\n",
        "sequence.num_output_tokens >= stopping.min_tokens\n",
        SCHEDULER_TESTS,
    ),
    Mutation(
        "a sequence boards before its grammar is compiled",
        "executor/scheduler/queues.py",
        "queue = self.waiting if sequence.is_ready else self.preparing",
        "queue = self.waiting",
        ("tests/unit/test_preparing.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a matcher that failed ends its sequence as if the output were complete",
        "executor/logits/grammar.py",
        "        if self._matcher.is_error():\n            # The mask",
        "        if False:\n            # The mask",
        ("tests/unit/test_grammar.py",),
    ),
    Mutation(
        "the end of a complete output is excluded by allowed_token_ids",
        "executor/logits/grammar.py",
        "choices.append(allowed & self._ends)",
        "choices.append(text & self._ends)",
        ("tests/unit/test_grammar.py",),
    ),
    Mutation(
        "the blocks of a finished sequence are free while a step in flight still writes to them",
        "executor/scheduler/scheduler.py",
        """        self._leave(sequence, None)
        if sequence.num_in_flight == 0:
            self._release(sequence)
""",
        """        self._leave(sequence, None)
        self._release(sequence)
""",
        SCHEDULER_TESTS,
    ),
    Mutation(
        "of cached blocks the most recently used one is evicted",
        "executor/scheduler/blocks.py",
        "self._cached.popitem(last=False)",
        "self._cached.popitem(last=True)",
        ("tests/unit/test_blocks.py", "tests/unit/test_prefix_cache.py"),
    ),
    Mutation(
        "a prompt that is cached as a whole leaves no token to compute logits from",
        "executor/scheduler/prefix_cache.py",
        "[: sequence.num_reusable_tokens // self._pool.block_size]",
        "[: sequence.num_tokens // self._pool.block_size]",
        ("tests/unit/test_prefix_cache.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a prefix is used without the recurrent state at its end",
        "executor/scheduler/states.py",
        "if hashes[number - 1] in self._kept), 0)",
        "if self._kept), 0)",
        ("tests/unit/test_states.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a checkpoint has the state of another position",
        "executor/scheduler/states.py",
        "builder.state_saves.append(StateSave(row, sequence, position, checkpoint))",
        "builder.state_saves.append(StateSave(row, sequence, position - 1, checkpoint))",
        ("tests/unit/test_states.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a checkpoint that its sequence has passed is dropped as late as others",
        "executor/scheduler/states.py",
        "PASSED_AGE * self._age(passed) > self._age(prefix)",
        "self._age(passed) > self._age(prefix)",
        ("tests/unit/test_hybrid_prefixes.py",),
    ),
    Mutation(
        "a prefix counts in placement although its recurrent state was dropped",
        "router/ledger/scripts/shared/checkpoints.lua",
        "return kept == '' or",
        "return true or",
        ("tests/unit/test_store_prefixes.py",),
    ),
    Mutation(
        "a sequence boards on blocks that others have reserved",
        "executor/scheduler/kv_policy.py",
        "return self._prefix_cache.would_share(sequence, num_missing)",
        "return True",
        ("tests/unit/test_shared_reservations.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "blocks that sharing saved once are offered for ever",
        "executor/scheduler/admission.py",
        "self._num_offered_blocks = max(num_saved_blocks, decayed)",
        "self._num_offered_blocks = max(num_saved_blocks, self._num_offered_blocks)",
        ("tests/unit/test_shared_reservations.py",),
    ),
    Mutation(
        "host memory that a plan reads is written by the same plan",
        "executor/scheduler/blocks.py",
        "self._released.extend(blocks)",
        "self._free.extend(blocks)",
        ("tests/unit/test_preemption.py", "tests/unit/test_host_prefixes.py"),
    ),
    Mutation(
        "blocks that a failed step was to copy to host memory are read by others",
        "executor/scheduler/scheduler.py",
        "finished.extend(self._end_touched(self._readers_of(plan.stored), error))",
        "pass",
        ("tests/unit/test_host_prefixes.py", "tests/property/test_host_prefixes.py"),
    ),
    Mutation(
        "prefix blocks keep copies of preempted sequences out of host memory",
        "executor/scheduler/blocks.py",
        "return len(self._free) + len(self._idle)",
        "return len(self._free)",
        ("tests/unit/test_host_prefixes.py",),
    ),
    Mutation(
        "short prompts pass a long one without end",
        "executor/scheduler/plan_builder.py",
        "num_left + place.num_passed < place.num_left",
        "num_left < place.num_left",
        ("tests/unit/test_prefill_line.py",),
    ),
    Mutation(
        "a used reservation ends the request",
        "executor/scheduler/scheduler.py",
        "FinishReason.LENGTH if is_whole else FinishReason.PREEMPTED",
        "FinishReason.LENGTH",
        ("tests/unit/test_admission.py", *SCHEDULER_TESTS),
    ),
    Mutation(
        "a sequence stays in the batch for one token more than it may have",
        "executor/scheduler/plan_builder.py",
        "if start + 2 >= sequence.length_limit:",
        "if start + 2 > sequence.length_limit:",
        SCHEDULER_TESTS,
    ),
    Mutation(
        "the largest inter-token target of the decodes counts",
        "executor/scheduler/queues.py",
        "return min(self._num_decodes_by_target, default=None)",
        "return max(self._num_decodes_by_target, default=None)",
        ("tests/unit/test_inter_token_targets.py",),
    ),
    Mutation(
        "prompts get nothing beside decodes that are late",
        "executor/engine/prefill_budget.py",
        "max(longest_s * MARGIN - decode_s, LEAST_SHARE * decode_s)",
        "longest_s * MARGIN - decode_s",
        ("tests/unit/test_step_time.py",),
    ),
    Mutation(
        "the executor takes a late duplicate of an attempt that has ended",
        "executor/scheduler/admission.py",
        "return newest is not None and attempt <= newest",
        "return newest is not None and attempt < newest",
        ("tests/unit/test_admission.py", *SCHEDULER_TESTS),
    ),
)
LEDGER = (
    Mutation(
        "a request is placed where one block is missing",
        "router/ledger/scripts/shared/rules/fits.lua",
        "return available_blocks(executor) >= blocks and blocks or nil",
        "return available_blocks(executor) >= blocks - 1 and blocks or nil",
        LEDGER_TESTS,
    ),
    Mutation(
        "an end of an earlier attempt ends the request that was placed again",
        "router/ledger/scripts/settle.lua",
        "elseif request.attempt == attempt and request.state",
        "elseif request.attempt >= attempt and request.state",
        LEDGER_TESTS,
    ),
    Mutation(
        "a tenant that comes back has saved up its turns",
        "router/ledger/scripts/shared/tenants.lua",
        """    if active and not tenant.active then
      tenant.counter = math.max(tenant.counter, state.floor)
    end
""",
        "",
        ("tests/unit/test_store_fairness.py", *LEDGER_TESTS),
    ),
    Mutation(
        "an executor that seated a suspect never seats another one",
        "router/ledger/scripts/shared/states.lua",
        "    executor.has_suspect = executor.has_suspect and request.failures == 0\n",
        "",
        ("tests/unit/test_store_suspects.py", *LEDGER_TESTS),
    ),
    Mutation(
        "the audit takes a placement back that its executor could not report yet",
        "router/ledger/scripts/report.lua",
        "elseif not unmatched or NOW - request.placed_ms > AUDIT_GRACE_MS then",
        "elseif not unmatched or NOW > request.placed_ms then",
        LEDGER_TESTS,
    ),
    Mutation(
        "a request with a near deadline waits behind those whose places were read before it came",
        "router/ledger/scripts/shared/states.lua",
        "    tenant.heads[request.class] = nil\n",
        "    head.is_whole = false\n",
        ("tests/unit/test_kept_records.py", *LEDGER_TESTS),
    ),
    Mutation(
        "leases lapse while no router was there to take a report",
        "router/ledger/scripts/reap.lua",
        "if not last_ms or NOW - tonumber(last_ms) > MAX_GAP_MS then",
        "if not last_ms then",
        ("tests/unit/test_store_outage.py", *LEDGER_TESTS),
    ),
)
LIFE_CYCLE = (
    Mutation(
        "a placement that is told twice is handed to the executor twice",
        "router/lifecycle/lifecycle.py",
        "elif self.attempt < placement.attempt:",
        "elif self.attempt <= placement.attempt:",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "news of the loss of an earlier attempt voids the current placement",
        "router/lifecycle/lifecycle.py",
        "elif self.placement is not None and self.current_attempt == event.attempt:",
        "elif self.placement is not None:",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "a preempted request counts as one whose executor died",
        "router/dispatch/dispatcher.py",
        "preempted=why in KEEPS_EXECUTOR,",
        "preempted=False,",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "a request that has used its reservation reserves no more",
        "router/stream/request_stream.py",
        "return self._demand.blocks_after(len(self.output_ids))",
        "return self._demand.blocks_after(0)",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "a client is told of a pause when a reservation is used up",
        "router/lifecycle/lifecycle.py",
        "self._requeue(RequeueReason.EXTENDED)",
        "self._requeue(RequeueReason.PREEMPTED)",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "a request that the ledger has lost while it was handed back waits for ever",
        "router/lifecycle/lifecycle.py",
        "            case HandBackRefusal.UNKNOWN:\n                self._resubmit()\n",
        "",
        LIFE_CYCLE_TESTS,
    ),
    Mutation(
        "a request that returns to the queue after its withdrawal stays there",
        "router/lifecycle/lifecycle.py",
        "            case Queued() if self.is_abandoned:\n                self._stop()\n",
        "",
        LIFE_CYCLE_TESTS,
    ),
)
STREAMS = (
    Mutation(
        "tokens of a placement that is void are taken",
        "router/executors/link.py",
        "return stream if stream.life.current_attempt == attempt else None",
        "return stream",
        ("tests/unit/test_void_placements.py",),
    ),
    Mutation(
        "text that was held back as a possible stop text is missing at the end",
        "router/stream/relay.py",
        "            self._unsent_text += self._unread(self._text.finish().text)\n",
        "            pass\n",
        ("tests/property/test_resumed_text.py",),
    ),
    Mutation(
        "an executor can give one client's request to another client",
        "router/request/executor_context.py",
        "if attached.request_id != attached.submit.request_id or attached.request_id not in own_ids:",
        "if attached.request_id != attached.submit.request_id:",
        ("tests/fuzz/test_frames_to_a_router.py",),
    ),
)
AUTHENTICATION = (
    Mutation(
        "a token without an expiry is valid for ever",
        "router/auth/jwt.py",
        'options={"require": ["iss", "aud", "exp", rules.tenant_claim]}',
        'options={"require": ["iss", "aud", rules.tenant_claim]}',
        ("tests/unit/test_doors.py",),
    ),
    Mutation(
        "a disabled API key still opens",
        "router/auth/api_keys.py",
        "return not self.is_disabled and (self.expires_s is None or now_s < self.expires_s)",
        "return self.expires_s is None or now_s < self.expires_s",
        ("tests/unit/test_doors.py",),
    ),
)
SAMPLING = (
    Mutation(
        "a bad word is excluded at the beginning of a line only",
        "router/api/tokenizing.py",
        """for form in (bare, f" {bare}")]""",
        """for form in (bare,)]""",
        ("tests/unit/test_bad_words.py",),
    ),
    Mutation(
        "the bad words of a request come on top of the model's",
        "router/request/submit.py",
        '("bad_words", "bad_word_ids"))',
        '("bad_words",), ("bad_word_ids",))',
        ("tests/unit/test_validation.py",),
    ),
    Mutation(
        "an executor gets a request whose bad words it ignores",
        "router/executors/link.py",
        "if version < parameter.since and",
        "if version < ATTACH_VERSION and",
        ("tests/integration/test_sampling_parameters.py",),
    ),
)
# The simulation must see them; it is in the tier `all` only.
SIMULATED = (
    Mutation(
        "room that an end makes is given with the next report only",
        "router/ledger/scripts/settle.lua",
        "  board.run()\n  return reply.finish({'SETTLED'",
        "  return reply.finish({'SETTLED'",
        ("tests/simulation/test_bounds.py", *LEDGER_TESTS),
    ),
    Mutation(
        "leases are three times as long",
        "router/ledger/scripts/shared/records.lua",
        "local LEASE_MS = 5000 ",
        "local LEASE_MS = 15000 ",
        ("tests/simulation/test_bounds.py", *LEDGER_TESTS),
    ),
    Mutation(
        "no router stands in for one that relays no reports",
        "router/dispatch/report_pacer.py",
        "if pace is not None and silent_s >= SILENCE_S * self.rank(executor_id):",
        "if False:",
        ("tests/simulation/test_bounds.py", "tests/unit/test_report_pacer.py"),
    ),
    Mutation(
        "requests that the ledger has forgotten are not submitted again",
        "router/dispatch/waiting_audit.py",
        "if await self._resubmit_forgotten(await self._find_suspected(self._next())):",
        "if await self._find_suspected(self._next()) and False:",
        ("tests/simulation/test_crash_schedules.py", "tests/unit/test_waiting_audit.py"),
    ),
    Mutation(
        "a request that has lost its placement is served by no router",
        "router/lifecycle/lifecycle.py",
        "            self._effects.append(RecordRequeued(self, why))\n            self._hand_back(placement, why)\n",
        "            self._forget()\n",
        ("tests/simulation/test_crash_schedules.py", *LIFE_CYCLE_TESTS),
    ),
)
USAGE = (
    Mutation(
        "tokens that are computed again are charged to the tenant",
        "executor/engine/accounting.py",
        "used.busy_ns += part_ns * (length - num_again)",
        "used.busy_ns += part_ns * length",
        ("tests/unit/test_accounting.py", "tests/property/test_accounting_properties.py"),
    ),
    Mutation(
        "what is left of a step by the division is charged to no account",
        "executor/engine/accounting.py",
        "part_ns, system_ns = divmod(busy_ns, max(1, plan.num_tokens))",
        "part_ns, system_ns = busy_ns // max(1, plan.num_tokens), 0",
        ("tests/unit/test_accounting.py", "tests/property/test_accounting_properties.py"),
    ),
    Mutation(
        "a report of usage that is repeated counts again",
        "router/ledger/scripts/charge.lua",
        "added[i] = math.max(0, figures[i] - booked[i])",
        "added[i] = figures[i]",
        ("tests/unit/test_store_usage.py",),
    ),
)
MUTATIONS = (*SCHEDULER, *LEDGER, *USAGE, *LIFE_CYCLE, *STREAMS, *AUTHENTICATION, *SAMPLING, *SIMULATED)
