"""Faults that this project once had, each put back by itself."""

from __future__ import annotations

from tests.bite.fault import Fault, historic

FAULTS: list[Fault] = [
    historic(
        "damaged-marks",
        "Damaged memory of an ended engine is read past its end, and suspects are invented from it.",
        "engine",
        (
            "hplm/engine/in_flight.py",
            "if not _PLACE.size <= size <= end - place or not 0 <= used <= size - _PLACE.size:",
            "if size < 0:",
        ),
    ),
    historic(
        "forged-quarantine",
        "A file of another kind in /dev/shm quarantines any tenant.",
        "tenants engine",
        ("hplm/tenants/quarantine.py", "return stat.S_ISREG(status.st_mode) and owner", "return owner"),
    ),
    historic(
        "unwritten-quarantine",
        "A tenant that ends the engine goes on doing so where no file can be written.",
        "engine tenants",
        ("hplm/engine/separation.py", "            self._unwritten[backbone][tenant_id] = time.monotonic() + SECONDS\n", ""),
    ),
    historic(
        "torch-memory",
        "A client whose batch found no memory is told of a fault of the server, and does not try again.",
        "engine",
        (
            "hplm/engine/failures.py",
            "return OutOfCapacity(str(said)) if faults.is_out_of_memory(error) else said",
            "return said",
        ),
    ),
    historic(
        "suspects-hidden",
        "A batch that broke the device is no longer shown when the engine ends, so its tenants do it again and again.",
        "engine",
        (
            "hplm/engine/pipeline.py",
            '        what = "staging" if staged is None else "computing"\n        if faults.stays(error):',
            '        what = "staging" if staged is None else "computing"\n        if staged is not None:\n'
            "            self._hand_back(batch, staged)\n        if faults.stays(error):",
        ),
    ),
    historic(
        "half-a-state",
        "A state with a registry and no snapshot counts as begun, so tenants that were lost are served as exported.",
        "tenants cli",
        (
            "hplm/tenants/registry.py",
            'if not any(self.state.snapshots.glob("*")):\n            self.state.check_begun()',
            "if not self.state.registry.exists():\n            self.state.check_begun()",
        ),
    ),
    historic(
        "state-begun-by-accident",
        "A remote change begins a new state at a mistaken path, and answers as if it held for the served tenants.",
        "tenants server",
        ("hplm/tenants/commands.py", "            self._manager.registry.check_begun()\n", "            pass\n"),
    ),
    historic(
        "lost-state",
        "A state that has lost CURRENT is begun anew: keys and deletions are gone, and everybody is let in.",
        "tenants cli",
        (
            "hplm/tenants/state.py",
            'if any(self.snapshots.glob("*")) or self._was_changed():\n            raise InvalidInput(',
            "if False:\n            raise InvalidInput(",
        ),
    ),
    historic(
        "wrong-bytes",
        "Wrong bytes sent to the admin model are answered as a fault of the server.",
        "tenants",
        (
            "hplm/tenants/commands.py",
            "except (ValueError, KeyError, SafetensorError) as error:",
            "except SafetensorError as error:",
        ),
    ),
    historic(
        "deep-command",
        "A command of deeply nested JSON is answered as a fault of the server.",
        "tenants server",
        ("hplm/tenants/commands.py", "except (ValueError, RecursionError) as error:", "except ValueError as error:"),
    ),
    historic(
        "labels-twice",
        "A tenant with the same label twice is accepted, and its answers are ambiguous.",
        "tenants",
        ("hplm/tenants/knowledge.py", "if times > 1]", "if times > 99]"),
    ),
    historic(
        "two-backbones",
        "`hplm tenant show` picks one of two tenants of the same name in two backbones.",
        "tenants cli",
        ("hplm/tenants/listing.py", "if len(found) > 1:", "if len(found) > 99:"),
    ),
    historic(
        "unsynced-names",
        "After a power cut the file that a decided change names is gone.",
        "tenants",
        ("hplm/tenants/registry.py", "        self.state.sync_folders()\n", ""),
    ),
    historic(
        "parameter-kinds",
        "Our gRPC client refuses a number or text whose type is a subclass, such as one of an enum.",
        "clients",
        ("clients/hplm_client/transports/grpc_aio.py", "if isinstance(value, own)", "if type(value) is own"),
    ),
    historic(
        "name-with-nul",
        "A tenant's name with a NUL is sent, and Triton answers as the tenant whose name ends there.",
        "clients",
        ("clients/hplm_client/wire.py", 'if "\\0" in name:', 'if "\\0\\0" in name:'),
    ),
    historic(
        "deep-error-page",
        "Our client raises RecursionError for an error page of deep JSON.",
        "clients",
        (
            "clients/hplm_client/transports/http.py",
            "except (ValueError, KeyError, TypeError, RecursionError):",
            "except (ValueError, KeyError, TypeError):",
        ),
    ),
    historic(
        "crash-sent-again",
        "OpenAI's client sends a request that ended the engine again, and ends it again.",
        "clients",
        ("clients/hplm_openai/errors.py", "OutOfCapacity | Crashed | Quarantined", "OutOfCapacity"),
    ),
    historic(
        "learned-and-lost",
        "A build that finds the disk full deletes hours of learning.",
        "builder importing",
        ("builder/tables/build_folder.py", 'if not any(self.folder.glob("*.pt")):', "if True:"),
    ),
    historic(
        "export-between-renames",
        "An export that was killed between its two renames loses tenants that only the repository had.",
        "publish",
        ("builder/publish/export.py", "        _put_back(version_folder)\n        if", "        if"),
    ),
    historic(
        "removed-log",
        "`hplm serve` ends when somebody removes its log.",
        "server",
        (
            "hplm/server/log.py",
            "    except FileNotFoundError:\n        return False",
            "    except FileNotFoundError:\n        raise",
        ),
    ),
    historic(
        "generate-timeout",
        "Encoders ignore the timeout of requests to Triton's generate endpoint.",
        "backends",
        (
            "backends/replies.py",
            'return request.timeout() or asked_number(parameters, "timeout", 0, 2**63 - 1)',
            "return request.timeout()",
        ),
    ),
    historic(
        "probes-counted",
        "A probe that fails counts as a refused request of clients.",
        "backends",
        (
            "backends/hplm_lookup/model.py",
            "                if not sender.is_probe:\n                    self._service.count",
            "                if True:\n                    self._service.count",
        ),
    ),
    historic(
        "views-read-again",
        "A table that cannot be opened lets every look read thousands of tenants again.",
        "engine tenants",
        ("hplm/engine/views.py", "if now >= self._again and (", "if ("),
    ),
    historic(
        "state-went-back",
        "A restored older state is served at once, with keys that were revoked since.",
        "engine tenants",
        ("hplm/engine/views.py", "generation, generation > served\n", "generation, True\n"),
    ),
    historic(
        "empty-key",
        "An empty HPLM_API_KEY is sent as a key.",
        "cli clients",
        ("hplm/cli/client.py", 'os.environ.get("HPLM_API_KEY") or None', 'os.environ.get("HPLM_API_KEY")'),
    ),
    historic(
        "layouts-kept",
        "Slots of layouts that no tenant has any more keep the device's memory.",
        "generation",
        (
            "hplm/generation/staging.py",
            "            self._give_room_back()\n            slots = self._slots",
            "            slots = self._slots",
        ),
    ),
    historic(
        "step-without-memory",
        "One large step without memory ends all answers of the decoder.",
        "generation",
        ("hplm/generation/running.py", "    middle = len(planned) // 2\n", "    return ()\n    middle = len(planned) // 2\n"),
    ),
    historic(
        "prefix-by-snapshot",
        "A change of any tenant makes a decoder compute all shared prompts again.",
        "generation",
        ("hplm/generation/request.py", "tuple(base for _, base in self.chain.links)", "id(self.chain)"),
    ),
    historic(
        "waiting-bytes",
        "Waiting prompts count a fraction of their memory, so a full queue takes the machine's.",
        "generation",
        ("hplm/generation/request.py", "        self.bytes = request.bytes\n", "        self.bytes = 8 * 2 * len(self.ids)\n"),
    ),
    historic(
        "decoder-domain",
        "A further version of a decoder's tenant falls back to the root's tables.",
        "importing",
        (
            "builder/importing/generative.py",
            'domain = domain or (before.domain if before is not None else "root")',
            'domain = domain or "root"',
        ),
    ),
    historic(
        "supervisor-model-set",
        "`hplm serve` ends when a model is loaded or unloaded while it asks the others.",
        "server",
        (
            "hplm/server/supervisor.py",
            "            why = self._ask(model, probe)\n            if why is not None:\n                self._restart(why)\n"
            "                return",
            "            why = self._ask(model, probe)\n            if why is not None:\n                self._restart(why)",
        ),
    ),
    historic(
        "small-rows",
        "DAS lets usual texts wait on a machine whose batches are small.",
        "scheduling",
        (
            "hplm/scheduling/das.py",
            "min(self.row_tokens or usual, capacity.tokens))",
            "min(self.row_tokens or 1, capacity.tokens))",
        ),
    ),
    historic(
        "half-a-line",
        "The line that a killed server began in its journal swallows the next server's first line.",
        "engine",
        ("hplm/engine/journal.py", "        if _ends_in_half_a_line(path):\n", "        if False:\n"),
    ),
    historic(
        "given-up-drains",
        "An engine that never comes back is called draining, and clients try for ever.",
        "engine",
        ("hplm/engine/keeper.py", "if self._outage.is_given_up(time.monotonic()):", "if False:"),
    ),
    historic(
        "turns-of-failed",
        "A backbone whose batches fail takes the engine's time without paying for it.",
        "scheduling",
        ("hplm/scheduling/scheduler.py", "            if batch.started_ns is not None:\n", "            if False:\n"),
    ),
    historic(
        "turns-catch-up",
        "A backbone that was idle keeps others from the engine until it has caught up.",
        "scheduling",
        ("hplm/scheduling/backbones.py", "used_ns += max(0, settled_ns - used_ns[backbone])", "used_ns += 0"),
    ),
    historic(
        "admission-by-nothing",
        "Admission refuses requests by the cost model of a backbone that has computed nothing.",
        "scheduling",
        (
            "hplm/scheduling/admission.py",
            "return self._costs[backbone if self._knows(backbone) else self._backbone]",
            "return self._costs[backbone]",
        ),
    ),
    historic(
        "forged-ages",
        "A client that claims an early arrival takes the cache from everybody.",
        "generation",
        (
            "hplm/generation/running.py",
            "return sequence.request.number, sequence.choice",
            "return sequence.arrival_ns, sequence.choice",
        ),
    ),
    historic(
        "idle-engine-late",
        "An idle engine refuses requests that it could answer in time.",
        "scheduling",
        (
            "hplm/scheduling/admission.py",
            "(int(CAUTION * cost.deviation * self._batch_ns) if busy else 0)",
            "int(CAUTION * cost.deviation * self._batch_ns)",
        ),
    ),
]
