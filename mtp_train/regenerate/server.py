"""An OpenAI-compatible server answers in our engine's place. Knows neither conversations nor files.

Prompts go to `/completions` as token ids and answers come back as token ids (`return_token_ids`, which vLLM has), so
nothing is tokenised twice. A server that does not return them is refused: text tokenised again is not what the target
said.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from mtp_train.core.errors import UserError
from mtp_train.engine.sampling import Sampling
from mtp_train.engine.sequences import Completion, Request

GIVE_UP = 16  # requests that fail one after the other: the server's fault, not theirs
STRANGERS = (401, 403, 404)  # the address, the model's name or a key is wrong
BUSY = (408, 425, 429)  # the only client errors that pass
LONGEST_PAUSE = 30.0  # seconds between attempts
# Where tokenizers differ: cases, digits, spaces, accents, scripts without spaces, code, an emoji of several tokens.
PROBE = "It's 3,141.59 — naïve Größe,  日本語 и русский\n\tdef f(x): return x**2  # 🙂🏽"
# The server's own defaults (a model's generation_config.json, often) must not change what is sampled.
PLAIN = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Server:
    """A server's completions.

    Args:
        address: with the version, such as http://host:8000/v1.
        model: name by which the server knows the target; empty if it serves one model.
        key: that the server asks for, sent as a bearer token and told to nobody else; empty for none.
        concurrency: requests in flight.
        timeout: seconds for one answer.
        retries: further attempts at a request that failed.
        pause: seconds before the second attempt; doubled for each further one.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        key: str = "",
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 5,
        pause: float = 1.0,
    ) -> None:
        self.address = address.rstrip("/")
        self.model = model
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.pause = pause
        self.limit = 0  # positions of a sequence, 0 if the server does not say

    def connect(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise `UserError` unless the server is there, serves the model, has our tokenizer and returns token ids."""
        with httpx.Client(timeout=self.timeout, headers=self._headers) as client:
            self._choose_model(self._checked(client, "GET", "models"))
            ids = tokenizer.encode(PROBE, add_special_tokens=False)
            body = self._body(Request("probe", tuple(ids), 1), Sampling())
            text = body | {"prompt": PROBE, "add_special_tokens": False}
            for probe in (body, text):  # the ids first: it is what the run sends
                self._check_probe(self._checked(client, "POST", "completions", probe), ids)

    def serve(
        self,
        source: Callable[[], Request | None],
        on_finish: Callable[[Completion], None],
        sampling: Sampling | None = None,
    ) -> None:
        """Complete requests as `source` gives them, as `Engine.serve` does.

        A request that the server can't take ends as "refused: ...", one that failed at every attempt as
        "error: ...". `UserError` when the server is gone or fails every request.
        """
        asyncio.run(self._serve(source, on_finish, sampling or Sampling()))

    async def _serve(
        self,
        source: Callable[[], Request | None],
        on_finish: Callable[[Completion], None],
        sampling: Sampling,
    ) -> None:
        limits = httpx.Limits(max_connections=self.concurrency)
        running: set[asyncio.Task[Completion | UserError]] = set()
        failed = 0
        async with httpx.AsyncClient(
            timeout=self.timeout, limits=limits, headers=self._headers
        ) as client:
            try:
                while True:
                    while len(running) < self.concurrency and (request := source()):
                        running.add(asyncio.create_task(self._answer(client, request, sampling)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    results = [task.result() for task in done]
                    for completion in results:  # what was answered is kept before anything stops
                        if isinstance(completion, Completion):
                            on_finish(completion)
                            wrong = completion.finish.startswith("error")
                            failed = failed + 1 if wrong else 0
                    self._require_alive(results, failed)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _answer(
        self, client: httpx.AsyncClient, request: Request, sampling: Sampling
    ) -> Completion | UserError:
        if self.limit and len(request.prompt) >= self.limit:
            why = f"refused: the prompt leaves no room below {self.limit} positions"
            return Completion(request.key, request.prompt, (), why)
        why = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            try:
                return await self._attempt(client, request, self._body(request, sampling))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if attempt == self.retries:
                    return self._gone(f"no connection ({error})")
            except httpx.TimeoutException:
                why = f"no answer in {self.timeout:g} s"
            except httpx.TransportError as error:
                why = f"broken connection ({type(error).__name__})"
            except ValueError as error:
                why = str(error)
        return Completion(request.key, request.prompt, (), f"error: server: {why}")

    async def _attempt(
        self, client: httpx.AsyncClient, request: Request, body: dict[str, Any]
    ) -> Completion | UserError:
        """One try: a completion, a refusal, or a fault that stops the run. Other failures are raised."""
        response = await client.post(f"{self.address}/completions", json=body)
        status = response.status_code
        if status in STRANGERS:
            return self._unusable(response)
        if status in range(400, 500) and status not in BUSY:
            # one reason for prompts of any length
            said = re.sub(r"\d+", "N", self._hidden(_message(response)))[:160]
            why = f"refused: the server refuses it: HTTP {status} {said}"
            return Completion(request.key, request.prompt, (), why)
        if status != 200:
            raise ValueError(f"HTTP {status}")
        return read_completion(request, body["max_tokens"], response.json())

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        room = self.limit - len(request.prompt) if self.limit else request.max_new_tokens
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": min(request.max_new_tokens, room),
            "temperature": sampling.temperature,
            "stop_token_ids": sorted(request.stop_tokens),
            "return_token_ids": True,
            **PLAIN,
        }
        return body if sampling.greedy else body | {"seed": request.seed}

    # --- faults that stop a run -------------------------------------------------------------------------------

    def _checked(
        self, client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Any:
        try:
            response = client.request(method, f"{self.address}/{path}", json=body)
            if response.is_error:
                raise self._unusable(response)
            return response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._gone(f"{type(error).__name__}: {error}") from error
        except UserError:
            raise
        except ValueError as error:
            raise self._foreign(f"/{path} is not JSON") from error

    def _choose_model(self, answer: Any) -> None:
        try:
            cards = {card["id"]: card for card in answer["data"]}
        except (TypeError, KeyError) as error:
            raise self._foreign("/models lists no models") from error
        if not self.model and len(cards) == 1:
            self.model = next(iter(cards))
        if self.model not in cards:
            raise UserError(
                "regenerate.model must be one that the server has",
                f"{self.model!r}; it has {', '.join(sorted(cards))}",
                "name one of them",
            )
        self.limit = int(cards[self.model].get("max_model_len") or 0)

    def _check_probe(self, answer: Any, ids: list[int]) -> None:
        try:
            choice = _choice(answer)
        except ValueError as error:
            raise self._foreign(str(error)) from error
        if not _are_ids(choice.get("token_ids")) or not _are_ids(choice.get("prompt_token_ids")):
            raise UserError(
                "the server must return token ids (return_token_ids): text tokenised again drifts",
                f"none from {self.address}",
                "serve with vLLM 0.10.2 or newer, or leave regenerate.server out",
            )
        if choice["prompt_token_ids"] != ids:
            raise UserError(
                "the server's tokenizer must be the target's",
                f"{choice['prompt_token_ids'][:12]}... where ours has {ids[:12]}...",
                "serve the folder that target.path names",
            )

    def _require_alive(self, results: list[Completion | UserError], failed: int) -> None:
        for error in results:
            if isinstance(error, UserError):
                raise error
        if failed >= GIVE_UP:
            last = next(item for item in results if isinstance(item, Completion))
            raise self._gone(f"{failed} failures one after the other, the last: {last.finish}")

    def _gone(self, why: str) -> UserError:
        return UserError(
            "the server must answer",
            f"{self.address}: {why}",
            "start it again, then run the same command: answers so far are kept",
        )

    def _foreign(self, why: str) -> UserError:
        return UserError(
            "regenerate.server must be the address of an OpenAI-compatible server",
            f"{self.address}: {why}",
            "give it with its version, such as http://host:8000/v1",
        )

    def _unusable(self, response: httpx.Response) -> UserError:
        asks_key = response.status_code in (401, 403)
        said = self._hidden(response.text)[:200]
        return UserError(
            "the server must take our requests",
            f"{response.request.url}: HTTP {response.status_code} {said}",
            "name the environment variable that holds its key: regenerate.key_env=NAME"
            if asks_key
            else "check regenerate.server and regenerate.model",
        )

    def _hidden(self, text: str) -> str:
        """What the server said, without the key: some servers quote it."""
        return text.replace(self._key, "(the key)") if self._key else text


def read_completion(request: Request, max_tokens: int, answer: Any) -> Completion:
    """The completion in a server's answer; `ValueError` says what is wrong with it."""
    choice = _choice(answer)
    tokens, finish = choice.get("token_ids"), choice.get("finish_reason")
    usage = answer.get("usage") or {}
    if not _are_ids(tokens) or not tokens:
        raise ValueError("an answer without token ids")
    if choice.get("prompt_token_ids") not in (None, list(request.prompt)) or usage.get(
        "prompt_tokens", len(request.prompt)
    ) != len(request.prompt):
        raise ValueError("it answered another prompt than was sent")
    if len(tokens) > max_tokens or usage.get("completion_tokens", len(tokens)) != len(tokens):
        raise ValueError("its counts of tokens don't agree")
    if finish not in ("stop", "length"):
        raise ValueError(f"it ended with {finish!r}")
    if finish == "stop" and tokens[-1] not in request.stop_tokens:
        raise ValueError("it ended without the end-of-turn token")
    return Completion(request.key, request.prompt, tuple(tokens), finish)


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("an answer without a choice")
    return choices[0]


def _message(response: httpx.Response) -> str:
    """What an error's body says, in vLLM's and OpenAI's form or any other."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return response.text


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
