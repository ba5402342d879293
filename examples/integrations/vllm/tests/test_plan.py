"""Arithmetic of schedules, without vLLM: against a walk over tokens one by one. A part of the repository's own
tests."""
import collections
import pathlib
import random
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tessera_vllm import plan, settings  # noqa: E402

BEHIND = 200  # tokens behind a prompt that are looked at
Stages = collections.namedtuple("Stages", "kept read channels")  # as the operators say them


def walked(schedule):
    """(end, dropped blocks) of every compaction, by the definition."""
    found, dropped = [], 0
    for position in range(1, schedule.prompt + BEHIND + 1):
        is_end = position == schedule.prompt or \
            (position < schedule.prompt and schedule.chunk and position % schedule.chunk == 0) or \
            (position > schedule.prompt and schedule.every_block and position % schedule.block == 0)
        spare = position // schedule.block - schedule.kept_blocks
        if is_end and spare > dropped:
            dropped = spare
            found.append((position, dropped))
    return found


def random_schedules(count):
    draw = random.Random(1)
    for _ in range(count):
        block = draw.choice([1, 2, 16, 32])
        chunk = draw.choice([0, block, 3 * block, block + draw.randrange(100), 500])
        yield plan.Schedule(draw.randrange(1, 1500), block, draw.randrange(1, 20), max(chunk, block) if chunk else 0,
                            draw.choice([0, 1, 8, 32, 64]), draw.random() < 0.2, draw.random() < 0.3)


class Schedules(unittest.TestCase):
    def test_compactions_are_those_of_a_walk_over_tokens(self):
        for schedule in random_schedules(200):
            found, position = [], 0
            while (position := schedule.next_compaction(position)) is not None and position <= schedule.prompt + BEHIND:
                found.append((position, schedule.dropped(position)))
            assert found == walked(schedule)
            for position in range(schedule.prompt + BEHIND):
                passed = [dropped for end, dropped in found if end <= position]
                assert schedule.dropped(position) == (passed[-1] if passed else 0)

    def test_what_is_shared_is_never_overwritten_nor_computed_from_a_compacted_prompt(self):
        for schedule in random_schedules(200):
            found = walked(schedule)
            shared, first = schedule.shared_blocks(), schedule.next_compaction(0)
            found = found or ([(first, schedule.dropped(first))] if first is not None else [])
            if not found:
                assert shared is None and schedule.longest_hit(schedule.prompt) == schedule.prompt
                continue
            for end, _ in found:
                overwritten = range(end // schedule.block - schedule.kept_blocks, end // schedule.block)
                assert shared <= overwritten.start
            assert shared * schedule.block <= found[0][0]
            hit = schedule.longest_hit(schedule.prompt)
            assert hit <= shared * schedule.block and (hit % schedule.block == 0 or hit == schedule.prompt)
            assert found[0][0] - hit >= min(schedule.window, found[0][0])

    def test_a_request_never_holds_more_than_it_is_admitted_with(self):
        draw = random.Random(2)
        for schedule in random_schedules(200):
            tokens = schedule.prompt + draw.choice([0, 0, 1, 40])
            position, first, later = 0, 0, 0
            while position < tokens:
                step = min(schedule.next_compaction(position) or tokens, tokens, position + draw.choice([17, 100, 400]))
                holds = plan.blocks_for(step, schedule.block) - schedule.dropped(position)
                if schedule.dropped(position):
                    later = max(later, holds)
                else:
                    first = max(first, holds)
                position = step
            assert first == schedule.blocks_before_first(tokens)
            assert later <= schedule.most_blocks_later(tokens)
            if schedule.chunk:
                most = schedule.kept_blocks + plan.blocks_for(schedule.chunk, schedule.block) + 1
                assert schedule.most_blocks_later(schedule.prompt) <= most

    def test_queries_of_a_window_are_there_whatever_the_chunks_were(self):
        draw = random.Random(3)
        for schedule in random_schedules(200):
            position, kept = schedule.longest_hit(draw.randrange(schedule.prompt + 1)), 0
            while position < schedule.prompt:
                end = min(schedule.next_compaction(position) or schedule.prompt, position + draw.randrange(1, 90))
                row = plan.row_of(schedule, position, end)
                there = kept + end - position
                assert row.compacts == schedule.compacts(end) and row.skipped == schedule.dropped(position)
                if row.compacts:
                    assert row.queries == min(max(1, schedule.window), end) <= there
                kept, position = min(row.keeps, there), end  # behind a hit fewer may be there, and are enough

    def test_a_hand_worked_case(self):
        # 100 tokens in blocks of 10, 30 of which stay: 7 leading blocks are free, the last three full ones overwritten.
        compact = plan.Schedule(prompt=105, block=10, kept_blocks=3)
        assert [compact.dropped(position) for position in (0, 104, 105, 200)] == [0, 0, 7, 7]
        assert compact.next_compaction(0) == 105 and compact.next_compaction(105) is None
        assert compact.shared_blocks() == 7 and compact.longest_hit(104) == 70
        # At 40, 80 and 105: 4, 8 and 10 full blocks less 3.
        chunked = plan.Schedule(prompt=105, block=10, kept_blocks=3, chunk=40)
        assert [chunked.dropped(position) for position in (39, 40, 79, 80, 104, 105)] == [0, 1, 1, 5, 5, 7]
        assert chunked.shared_blocks() == 1
        assert chunked.blocks_before_first(105) == 4 and chunked.most_blocks_later(105) == 8 - 1

    def test_a_request_that_is_off_or_fits_stays_whole(self):
        server = settings.Settings(budget=256)
        off = settings.for_request(server, {"tessera": {"mode": "off"}})
        for own, prompt in ((off, 4000), (server, 256), (server, 287)):
            schedule = plan.schedule_of(own, prompt, 32)
            assert schedule.next_compaction(0) is None and schedule.dropped(10 ** 6) == 0
            assert schedule.shared_blocks() is None

    def test_what_steps_read_is_the_budget_in_whole_blocks_and_the_newest_block(self):
        server = settings.of_server({"tessera": {"mode": "read", "method": "quest", "budget": 60}})
        for prompt in (1, 31, 95, 96, 97, 1000):
            schedule = plan.schedule_of(server, prompt, 32)
            assert schedule.next_compaction(0) is None and schedule.dropped(10 ** 6) == 0
            assert schedule.longest_hit(prompt) == prompt and schedule.read_blocks == 3
            first = schedule.first_reading(0)
            assert first == max(prompt, 96) and schedule.shared_blocks() == first // 32
            for position in range(prompt, prompt + BEHIND):
                read = schedule.tokens_read(position)
                whole = position < first
                assert read == position + 1 if whole else 64 < read <= 96 and (read - position - 1) % 32 == 0

    def test_a_plan_says_what_stays_and_what_steps_read_of_it(self):
        server = settings.of_server({"tessera": {"mode": "compact_and_read", "method": "rocketkv", "budget": 64}})
        draw = random.Random(6)
        for _ in range(200):
            prompt, kept, read = draw.randrange(1, 900), draw.randrange(32, 500), draw.randrange(8, 100)
            schedule = plan.schedule_of(server, prompt, 16, Stages(min(prompt, kept), read, 9))
            kept, chosen = plan.blocks_for(min(prompt, kept), 16), plan.blocks_for(read, 16)
            dropped = max(0, prompt // 16 - kept)
            assert schedule.dropped(prompt - 1) == 0 and schedule.dropped(prompt + BEHIND) == dropped
            assert schedule.channels == 9 and schedule.window == 32
            assert schedule.shared_blocks() == (dropped or schedule.first_reading(0) // 16)
            for position in range(prompt, prompt + BEHIND):
                stored = position + 1 - 16 * dropped
                whole = (stored - 1) // 16 <= chosen  # the newest block, and as many as are chosen
                assert (position < schedule.first_reading(prompt)) == whole
                assert schedule.tokens_read(position) == (stored if whole else 16 * chosen + (stored - 1) % 16 + 1)

    def test_a_window_always_fits_what_is_kept(self):
        own = settings.for_request(settings.Settings(budget=256), {"tessera": {"budget": 1}})
        assert plan.schedule_of(own, 1000, 16).kept_blocks == 2  # the window's 32 tokens

    def test_a_servers_wrong_setting_is_refused_in_a_sentence(self):
        for given, said in [
            ("snapkv", "is 'snapkv'; expected a dict"), ({"modus": "compact"}, "is 'modus'; expected budget, chunk"),
            ({"mode": "write"}, "mode is 'write'; expected chunked, compact, compact_and_read, off, read, uneven"),
            ({"mode": 3}, "mode is 3"),
            ({"mode": "read"}, "method is 'snapkv' in the mode 'read'; expected hsa, quest; take one of these, or the "
                               "mode 'compact'"),
            ({"method": "rocketkv_mt"}, "single tokens that a prompt's end has chosen"),
            ({"method": "sparq"}, "smallest and largest keys"),
            ({"method": "rocketkv"}, "method is 'rocketkv' in the mode 'compact'; expected chunkkv, criticalkv"),
            ({"method": "rocketkv", "mode": "read"}, "take one of these, or the mode 'compact_and_read'"),
            ({"method": "quest", "mode": "read", "parameters": {"newest": 1}},
             "newest is 1; expected none; leave it out: a step reads the newest block in any case"),
            ({"method": "hsa", "mode": "read", "parameters": {"unit": "token"}}, "unit is 'token'; expected 'page'"),
            ({"method": "kvzip"}, "method is 'kvzip'; expected ada_snapkv, chunkkv"),
            ({"method": "pyramidkv"}, "gives layers unequal numbers of tokens"),
            ({"method": "ada_snapkv"}, "method is 'ada_snapkv' in the mode 'compact'; expected chunkkv, criticalkv"),
            ({"method": "ada_snapkv"}, "or the mode 'uneven'"),
            ({"mode": "uneven"}, "method is 'snapkv' in the mode 'uneven'; expected ada_snapkv, tangram; take one of "
                                 "these, or the mode 'compact'"),
            ({"method": "quest"}, "method is 'quest' in the mode 'compact'; expected chunkkv, criticalkv"),
            ({"method": "quest"}, "or the mode 'read'"), ({"method": "nonsense"}, "method is 'nonsense'"),
            ({"method": ["snapkv"]}, "method is ['snapkv']"), ({"method": "a_shape"}, "keeps every token"),
            ({"budget": 0}, "budget is 0; expected a whole number from 1"), ({"budget": 2.5}, "budget is 2.5"),
            ({"budget": True}, "budget is True"), ({"budget": "256"}, "budget is '256'"),
            ({"chunk": -1}, "chunk is -1"),
            ({"parameters": [1]}, "parameters is [1]"), ({"parameters": {"window": "32"}}, "window is '32'"),
            ({"parameters": {"window": 512}}, "budget is 256; expected at least the window, which is 512"),
            ({"parameters": {"sink_logits": 4}}, "a name of parameters is 'sink_logits'"),
            ({"figures": 7}, "figures is 7"),
        ]:
            with self.subTest(said), self.assertRaises(ValueError) as caught:
                settings.of_server({"tessera": given})
            self.assertTrue(said in str(caught.exception) and "\n" not in str(caught.exception), caught.exception)

    def test_a_requests_wrong_setting_is_refused_in_a_sentence(self):
        for given, said in [
            (4, "is 4; expected a dict"), ("budget=4", "is 'budget=4'; expected JSON"),
            ('{"budget": 0}', "budget is 0"),
            ({"method": "snapkv"}, "is 'method'; expected budget, chunk, mode"),
            ({"budget": -4}, "budget is -4"), ({"mode": "compress"}, "mode is 'compress'"),
            ({"chunk": 1 << 40}, "chunk is"),
        ]:
            with self.subTest(said), self.assertRaises(ValueError) as caught:
                settings.of_request({"tessera": given})
            self.assertTrue(said in str(caught.exception), caught.exception)

    def test_a_profile_is_read_and_a_wrong_one_refused_in_a_sentence(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "profile.json")
            asked = {"mode": "uneven", "method": "tangram", "profile": str(path)}
            for text, more, said in [
                (None, {}, "expected the path of a file of `tessera calibrate`"), ("[]", {}, "TypeError"),
                ('{"budget": [[0.5, 1.5]]}', {}, "expected a share in (0, 1]"),
                ('{"budget": [[0.5], [0.5, 0.5]]}', {}, "expected a share in (0, 1]"),
                ('{"budget": [[0.5]]}', {"budget": 64}, "profile is given beside tangram and a budget"),
                ('{"budget": [[0.5]]}', {"method": "ada_snapkv"},
                 "profile is given beside ada_snapkv; expected one of tangram"),
            ]:
                if text is not None:
                    path.write_text(text)
                with self.subTest(said), self.assertRaises(ValueError) as caught:
                    settings.of_server({"tessera": {**asked, **more}})
                self.assertTrue(said in str(caught.exception), caught.exception)
            own = settings.of_server({"tessera": asked})
            assert own.profile == ((0.5,),)
            with self.assertRaises(ValueError) as caught:
                settings.for_request(own, {"tessera": {"budget": 4}})
            self.assertTrue("budget of a request is 4; expected none" in str(caught.exception), caught.exception)

    def test_a_request_of_a_mode_that_the_servers_method_has_not_is_refused(self):
        for server, mode, said in [
                ({"mode": "uneven", "method": "ada_snapkv"}, "compact",
                 "expected uneven or off, as the server has ada_snapkv"),
                ({"mode": "read", "method": "quest"}, "chunked", "expected read or off, as the server has quest"),
                ({"method": "keydiff"}, "uneven", "expected compact, chunked or off, as the server has keydiff")]:
            own = settings.of_server({"tessera": server})
            assert settings.for_request(own, {"tessera": {"mode": "off"}}).mode == "off"
            with self.assertRaises(ValueError) as caught:
                settings.for_request(own, {"tessera": {"mode": mode}})
            self.assertTrue(said in str(caught.exception), caught.exception)

    def test_nothing_is_asked_of_a_server_without_settings(self):
        assert settings.of_server({}) is None and settings.of_server(None) is None
        assert settings.of_request({"tessera": '{"budget": 512}'}) == settings.of_request({"tessera": {"budget": 512}})
        assert settings.of_request(None) == {} and settings.of_request({"other": 1}) == {}


if __name__ == "__main__":
    unittest.main()
