"""Every Redis key, its type, and how long it lives. Nothing else in the project spells one.

The prefix is a setting. On Redis Cluster make it a hash tag (`{sw}:`), so that a pool is one
slot and every script's keys are reachable from one node.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    prefix: str = "sw:"

    # -- permanent: these may live without a TTL ------------------------------------------

    @property
    def jobs(self) -> str:
        """stream: pushed jobs, read by the leader, entries deleted by submit and refuse."""
        return self.prefix + "jobs"

    @property
    def cancel(self) -> str:
        """stream: cancel requests, read by the leader, entries deleted by cancel."""
        return self.prefix + "cancel"

    @property
    def reports(self) -> str:
        """stream: what workers did, read by the leader, deleted once acted on."""
        return self.prefix + "reports"

    @property
    def outbox(self) -> str:
        """stream: ends of jobs that somebody outside asked to be told of; read by the sender."""
        return self.prefix + "outbox"

    @property
    def celery(self) -> str:
        """hash: tasks that came by Celery and were not told their end -> entry and context."""
        return self.prefix + "celery"

    @property
    def deliveries(self) -> str:
        """sorted set: webhooks and uploads that are still owed, by when to try them (ms)."""
        return self.prefix + "deliveries"

    @property
    def dead(self) -> str:
        """stream, capped: jobs that failed again and again, for `slackwater dead`."""
        return self.prefix + "dead"

    @property
    def seq(self) -> str:
        """string: the last dispatch number handed out."""
        return self.prefix + "seq"

    @property
    def active(self) -> str:
        """set: ids of jobs that are not terminal; a coordinator rebuilds itself from it."""
        return self.prefix + "active"

    @property
    def workers(self) -> str:
        """set: names of registered workers, dead ones included until the leader removes them."""
        return self.prefix + "workers"

    @property
    def manifests(self) -> str:
        """hash: "{model}/{stage}" -> JSON, published by the workers that loaded it."""
        return self.prefix + "manifests"

    @property
    def costs(self) -> str:
        """hash: what the cost model has learned, "{model}/{stage}/{shape}" -> JSON."""
        return self.prefix + "costs"

    @property
    def profile(self) -> str:
        """hash: model -> JSON, the cost table that `slackwater profile` measured in this pool."""
        return self.prefix + "profile"

    @property
    def policy(self) -> str:
        """hash: the policy that leads and how it fares; `wanted` is what the operator asks for."""
        return self.prefix + "policy"

    @property
    def pool(self) -> str:
        """hash: "{host}/{stage}" -> wanted worker processes, read by that host's launcher."""
        return self.prefix + "pool"

    # -- with a lease or a TTL ------------------------------------------------------------

    def launcher(self, host: str) -> str:
        """hash: pid and counts of a host's launcher (`slackwater up`); expires with its lease."""
        return f"{self.prefix}launcher:{host}"

    @property
    def leader(self) -> str:
        """string: the leading coordinator's nonce; expires with its lease."""
        return self.prefix + "leader"

    @property
    def sender(self) -> str:
        """string: the nonce of the process that reads the outbox; expires with its lease."""
        return self.prefix + "sender"

    def delivery(self, name: str) -> str:
        """hash with a TTL: one webhook or upload that is owed, or that was given up."""
        return f"{self.prefix}delivery:{name}"

    def worker(self, name: str) -> str:
        """hash: stage, models, host, pid, …; expires with the worker's lease."""
        return f"{self.prefix}worker:{name}"

    def tasks(self, worker: str) -> str:
        """stream: messages to one worker, which is its only reader; expires after the worker."""
        return f"{self.prefix}tasks:{worker}"

    def task(self, seq: int) -> str:
        """hash: the record of one dispatch; with a TTL, since its job may end before it does."""
        return f"{self.prefix}task:{seq}"

    @property
    def janitor(self) -> str:
        """hash: what was swept so far, by kind, and when last; expires when nobody sweeps."""
        return self.prefix + "janitor"

    @property
    def timeline(self) -> str:
        """stream, capped: every task that ran, with its rank and steps; expires when none comes."""
        return self.prefix + "timeline"

    def job(self, job: str) -> str:
        """hash: the public record; no TTL while the job is active."""
        return f"{self.prefix}job:{job}"

    def trajectory(self, job: str) -> str:
        """hash: what is needed to go on with a job; deleted by finish."""
        return f"{self.prefix}trajectory:{job}"

    def events(self, job: str) -> str:
        """stream, capped: transitions and steps of one job; no TTL while it is active."""
        return f"{self.prefix}events:{job}"

    def result(self, job: str) -> str:
        """string: msgpack, written once by finish or refuse."""
        return f"{self.prefix}result:{job}"

    def output(self, job: str, n: int) -> str:
        """string: the n-th file's bytes, moved here by finish."""
        return f"{self.prefix}output:{job}:{n}"

    def staged(self, job: str, seq: int, n: int) -> str:
        """string with a TTL: the n-th file's bytes before finish moved them."""
        return f"{self.prefix}staged:{job}:{seq}:{n}"

    def latents(self, job: str, seq: int, part: str) -> str:
        """hash with a TTL: a state that was spilled, in pieces (common/spill.py)."""
        return f"{self.prefix}latents:{job}:{seq}:{part}"

    def preview(self, job: str) -> str:
        """hash with a TTL: a small picture of what a running job has come to, and at which step."""
        return f"{self.prefix}preview:{job}"

    def movie(self, job: str, n: int) -> str:
        """string with a TTL: the n-th file as MP4, made by a side job."""
        return f"{self.prefix}movie:{job}:{n}"

    def pushed_by(self, caller: str) -> str:
        """hash with a TTL: job -> entry, jobs that an API key pushed and that count for it."""
        return f"{self.prefix}pushed:{caller}"

    @property
    def videos(self) -> str:
        """sorted set with a TTL: jobs pushed as videos over HTTP, by time (ms), for the list."""
        return self.prefix + "videos"

    def canceled(self, job: str) -> str:
        """string with a TTL: a cancel that came before its job."""
        return f"{self.prefix}canceled:{job}"

    def permanent(self) -> frozenset[str]:
        """The keys that may be without a TTL while nothing runs."""
        return frozenset(
            {
                self.jobs,
                self.cancel,
                self.reports,
                self.outbox,
                self.celery,
                self.deliveries,
                self.dead,
                self.seq,
                self.active,
                self.workers,
                self.manifests,
                self.costs,
                self.profile,
                self.policy,
                self.pool,
            }
        )
