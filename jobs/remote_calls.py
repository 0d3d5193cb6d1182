"""Calls to an object store: which faults pass and are tried again, which are final, how long it
takes to give up.

A final fault comes out as an `OSError` of the fitting kind; a store that does not answer for long
as a `StorageError`. Credentials are the business of the store's own library and are never shown.
"""

import errno
import importlib
import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import fsspec

from batchmla.errors import JobError, StorageError

_LOG = logging.getLogger(__name__)

Result = TypeVar("Result")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
PINNED = re.compile(r"hf://datasets/[^/@]+/[^/@]+@[0-9a-f]{40}(?:/|$)")  # a repository's commit
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_NEEDS = {"s3": "s3fs", "gcs": "gcsfs"}

# Faults by the code that S3 gives them, where Python's kind of error says too little.
_PASSING = {"IncompleteBody", "BadDigest", "InvalidPart", "NoSuchUpload", "RequestTimeout"}
_FINAL_KINDS = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError,
)  # fmt: skip
_FINAL_NUMBERS = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE}
_LIBRARIES = {"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "requests", "urllib3"}
_LIBRARIES |= {"huggingface_hub", "httpx", "httpx2", "httpcore"}
_MISUSED = {"ParamValidationError", "InvalidRegionError", "UnknownServiceError"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_NO_CREDENTIALS |= {"CredentialRetrievalError", "DefaultCredentialsError", "RefreshError"}
_S3_CLIENT = {  # what is tried again, and for how long, is settled here and nowhere below
    "connect_timeout": 10,
    "read_timeout": 30,
    "retries": {"total_max_attempts": 1},
}


HURRIED_S = 5.0


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How a call is tried again: after `first_wait_s`, then twice as long each time up to
    `most_wait_s`, less a random part of it; until `total_s` have passed since it began."""

    total_s: float = 120.0
    first_wait_s: float = 0.1
    most_wait_s: float = 15.0
    least_attempts: int = 4  # also when one took longer than all may, as of a machine that slept
    is_hurried: Callable[[], bool] = _never  # from then on the end comes after HURRIED_S

    def is_over(self, took_s: float, attempts: int) -> bool:
        """Whether there is to be no further attempt that begins `took_s` after the first."""
        if self.is_hurried():
            return took_s > min(self.total_s, HURRIED_S)
        return took_s > self.total_s and attempts >= self.least_attempts

    def rest(self, wait_s: float) -> None:
        """Sleeps, but not on when the end has come nearer."""
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0 and not self.is_hurried():
            time.sleep(min(left_s, 0.5))

    def wait_s(self, attempt: int) -> float:
        """Before the attempt that follows `attempt`, counted from 0."""
        longest_s = min(self.most_wait_s, self.first_wait_s * 2.0 ** min(attempt, 32))
        return longest_s * random.uniform(0.5, 1.0)


ONCE = Patience(total_s=0.0, least_attempts=1)  # for what can be done without
BRIEF = Patience(total_s=30.0)  # for the first word with a store
PARTING = Patience(total_s=HURRIED_S, least_attempts=1)  # and for the last one


def is_url(text: str) -> bool:
    """Whether a path means an object store, or files of a hub at one commit of theirs."""
    if text.startswith("hf://"):
        return PINNED.match(text) is not None
    return _URL.match(text) is not None and not text.startswith("file://")


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def filesystem(url: str) -> Any:
    """The fsspec file system that `url` lies in; a `JobError` where there is none."""
    scheme = scheme_of(url)
    extra = _EXTRAS.get(scheme)
    try:
        return _filesystem(scheme, extra, os.getpid())
    except ImportError:
        what = f"batchmla[{extra}]" if extra else f"the package that fsspec needs for {scheme}://"
        raise JobError(f"{url} cannot be reached: run pip install '{what}' once") from None
    except ValueError:
        raise JobError(
            f"{url}: no store is known by {scheme}://; give s3://BUCKET/…, gs://BUCKET/… or a "
            f"local path"
        ) from None
    except Exception as error:  # of another library, when it looks for credentials
        raise _final(url, error) if _is_of_library(error) else error from error


@cache
def _filesystem(scheme: str, extra: str | None, pid: int) -> Any:
    """One for all threads of the process `pid`: to make one takes a while."""
    if extra is not None:
        importlib.import_module(_NEEDS[extra])
    if extra != "s3":
        return fsspec.filesystem(scheme, use_listings_cache=False)
    system = fsspec.filesystem(
        scheme, use_listings_cache=False, max_concurrency=1, config_kwargs=_S3_CLIENT
    )
    system.retries = 1
    return system


def call(url: str, action: Callable[[], Result], patience: Patience | None = None) -> Result:
    """What `action` returns, tried again while the store fails in a way that passes.

    An `OSError` is final. A `StorageError` says that the store did not recover in time.
    """
    patience = patience or Patience()
    began_s, attempt = time.monotonic(), 0
    while True:
        try:
            return action()
        except Exception as error:  # of any of the libraries below fsspec
            if not _is_of_library(error):
                raise
            if _is_final(error):
                raise _final(url, error) from error
            wait_s = patience.wait_s(attempt)
            if patience.is_over(time.monotonic() + wait_s - began_s, attempt + 1):
                raise StorageError(
                    f"{url}: the store does not answer as it should ({_words(error)}), tried "
                    f"{attempt + 1} times; run the same command again when it does: finished rows "
                    f"are kept"
                ) from error
            attempt += 1
            _LOG.info("%s: %s; tried again in %.1f s", url, _words(error), wait_s)
            patience.rest(wait_s)


def _is_of_library(error: Exception) -> bool:
    """Whether it is the store or its library that failed, and not our own code."""
    if isinstance(error, OSError | NotImplementedError):
        return True
    return type(error).__module__.split(".")[0] in _LIBRARIES


def _is_final(error: Exception) -> bool:
    if _code_of(error) in _PASSING:
        return False
    if isinstance(error, NotImplementedError):
        return True
    if type(error).__name__ in _NO_CREDENTIALS | _MISUSED:
        return True
    if isinstance(error, _FINAL_KINDS):
        return True
    status = _status_of(error)
    if isinstance(error, OSError) and status is None:
        return error.errno in _FINAL_NUMBERS
    return status is not None and 400 <= status < 500 and status not in (408, 429)


def _status_of(error: Exception) -> int | None:
    """What HTTP says, as far as gcsfs, google's libraries and the hub's pass it on."""
    answer = getattr(error, "response", None)
    status = getattr(error, "code", None) or getattr(answer, "status_code", None)
    return status if isinstance(status, int) else None


def _code_of(error: Exception) -> str | None:
    """The name that S3 gave the fault."""
    response = getattr(error.__cause__ or error, "response", None)
    if not isinstance(response, dict):
        return None
    code = response.get("Error", {}).get("Code")
    return code if isinstance(code, str) else None


def _final(url: str, error: Exception) -> OSError:
    """The same as an `OSError` with number and words."""
    if type(error).__name__ in _NO_CREDENTIALS:
        return PermissionError(errno.EACCES, f"no usable credentials for {scheme_of(url)}:// found")
    if isinstance(error, NotImplementedError):
        return OSError(errno.ENOSYS, f"{scheme_of(url)}:// cannot do this")
    if isinstance(error, FileNotFoundError):
        words = "there is no such bucket" if _code_of(error) == "NoSuchBucket" else "it is not here"
        return FileNotFoundError(errno.ENOENT, words)
    if isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, f"permission is denied ({_words(error)})")
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EINVAL
    return OSError(number, _words(error))


def _words(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
