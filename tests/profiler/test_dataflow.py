"""Which assignments of a loop make its batches: in each source, the lines that end in `# batch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.profiler.system.loop_source import batch_lines

MATCHES = {
    "function": """
        for i in range(9):  # batch
            x, y = get_batch()  # batch
            loss = criterion(model(x), y)
            loss.backward()
            opt.step()  # step
        """,
    "no name for the loss": """
        for i in range(9):  # batch
            x, y = get_batch()  # batch
            opt.zero_grad(); criterion(model(x), y).backward(); opt.step()  # step
        """,
    "several steps to the batch": """
        while True:
            rows = draw(size)  # batch
            x = torch.stack(  # batch
                [data[row] for row in rows]  # batch
            )  # batch
            x = x.to(device)  # batch
            logits = model(x)  # batch
            loss = logits.mean()
            scaler.scale(loss).backward()
            scaler.step(opt)  # step
        """,
    "the next batch at the end": """
        while True:
            logits, loss = model(x, y)
            loss = loss / 2
            loss.backward()
            opt.step()  # step
            x, y = get_batch("train")  # batch
        """,
    "both branches": """
        for i in range(9):  # batch
            if i % 2:
                batch = left()  # batch
            else:
                batch = right()  # batch
            loss = model(**batch)
            accelerator.backward(loss)
            opt.step()  # step
        """,
    "accumulated": """
        while True:
            for micro in range(4):
                x: Tensor = get_batch()  # batch
                loss = model(x)
                loss.backward()
            opt.step()  # step
        """,
    "a step of its own": """
        for i in range(9):  # batch
            batch = sample(i)  # batch
            metrics = train_step(batch)  # step
        """,
    "closure": """
        while True:
            x = get_batch()  # batch
            def closure():
                loss = model(x)
                loss.backward()
                return loss
            opt.step(closure)  # step
        """,
    "attributes": """
        while True:
            self.batch = self.sample()  # batch
            self.loss = self.model(self.batch)
            self.loss.backward()
            self.opt.step()  # step
        """,
}
MISSES = {
    "logging": """
        for i in range(9):  # batch
            loss = model(data)
            loss.backward()
            opt.step()  # step
            loss = loss.item()
            history = plot(loss)
        """,
    "learning rate": """
        for i in range(9):  # batch
            lr = schedule(i)
            for group in opt.param_groups:
                group["lr"] = lr
            opt.param_groups[0]["lr"] = lr
            loss = model(data)
            loss.backward()
            opt.step()  # step
        """,
    "evaluation": """
        for i in range(9):  # batch
            score = evaluate(model)
            best = max(best, score)
            loss = model(data)
            loss.backward()
            opt.step()  # step
        """,
    "other attributes": """
        while True:
            self.score = self.evaluate()
            loss = self.model(self.data)
            loss.backward()
            self.opt.step()  # step
        """,
    "a function's own names": """
        while True:
            def report(x):
                y = render(x)
                return y
            report(1)
            loss = model(x, y)
            loss.backward()
            opt.step()  # step
        """,
    "another loop": """
        for i in range(9):
            x = get_batch()
            loss = model(x)
            loss.backward()
        opt.step()  # step
        """,
}


# As MATCHES, with the lines in which the model is called: what follows from its result is no batch.
AROUND_THE_MODEL = {
    "between forward and backward": """
        x, y = get_batch()
        while True:
            for micro in range(4):
                with context:
                    logits, loss = model(x, y)  # model
                    loss = loss / 4
                x, y = get_batch("train")  # batch
                scaler.scale(loss).backward()
            scaler.step(opt)  # step
        """,
    "what is made of the result": """
        for i in range(9):  # batch
            x, y = get_batch()  # batch
            logits = model(x)  # model
            logits = smooth(logits)
            y = one_hot(y)
            loss = criterion(logits, y)
            loss.backward()
            opt.step()  # step
        """,
    "a name used again": """
        for i in range(9):  # batch
            out = model(x)  # model
            loss = out.mean()
            out = get_batch()  # batch
            x = out.float()  # batch
            loss.backward()
            opt.step()  # step
        """,
    "a penalty on the weights": """
        for x, y in data:  # batch
            out = net(x)  # model
            penalty = slow_penalty(net.parameters())
            loss = criterion(out, y) + penalty
            loss.backward()
            opt.step()  # step
        """,
    "a penalty on the model": """
        net.train()
        for x, y in data:  # batch
            out = net(x)  # model
            penalty = slow_penalty(net)
            doubled = 2 * penalty
            loss = criterion(out, y) + doubled
            loss.backward()
            opt.step()  # step
        """,
    "a teacher": """
        for x, y in data:  # batch
            out = net(x)  # model
            with torch.no_grad():
                target = teacher(x)
            weights = weigh(y)
            loss = criterion(out, target) * weights
            loss.backward()
            opt.step()  # step
        """,
    "a teacher first": """
        while True:
            x = get_batch()  # batch
            x = x.to(net.device)  # batch
            target = teacher(x)
            out = net(x)  # model
            loss = criterion(out, target)
            loss.backward()
            opt.step()  # step
        """,
    "a teacher of the next batch's kind": """
        teacher.eval()
        while True:
            out = net(x)  # model
            x = get_batch()  # batch
            x = augment(x)  # batch
            noise = teacher(torch.randn(9))
            loss = criterion(out, noise)
            loss.backward()
            opt.step()  # step
        """,
    "rows by number": """
        for i in range(9):  # batch
            out = net(rows[i], y)  # model
            y = targets(i)  # batch
            z = rows[i + 1].float()  # only the loss reads it
            loss = criterion(out, z)
            loss.backward()
            opt.step()  # step
        """,
    "all in one line": """
        while True:
            for x, y in data: loss = criterion(net(x), y); loss.backward(); opt.step()  # step and model
        """,
    "the step hands it back": """
        for i in range(9):  # batch
            batch = train_step(batch)  # step and model
        """,
}


SOURCES = {**MATCHES, **MISSES, **AROUND_THE_MODEL}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_lines_that_make_batches(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    rows = [row[8:] for row in source.splitlines()]
    script.write_text("\n".join(rows) + "\n")
    step = next(number for number, row in enumerate(rows, 1) if "# step" in row)
    called = {(str(script), number) for number, row in enumerate(rows, 1) if row.endswith("model")}

    found = batch_lines([(str(script), step)], called)

    assert sorted(line for _, line in found) == [n for n, row in enumerate(rows, 1) if row.endswith("# batch")]


def test_functions_between_the_loop_and_the_step_are_looked_at(tmp_path: Path) -> None:
    """Functions around the loop are not: they run once."""
    script = tmp_path / "script.py"
    script.write_text(
        "def main():\n"
        "    batch = get_batch()\n"
        "    def step(batch):\n"
        "        loss = model(batch)\n"
        "        following = get_batch()\n"
        "        loss.backward()\n"
        "        opt.step()\n"
        "        return following\n"
        "    while True:\n"
        "        batch = step(batch)\n"
        "main()\n"
    )
    file = str(script)
    frames = [(file, 7), (file, 10), (file, 11)]

    assert batch_lines(frames, {(file, 4), (file, 10), (file, 11)}) == {(file, 5)}
