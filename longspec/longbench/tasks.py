"""The benchmark tasks: their prompts, and the length of their answers.

Prompts and lengths of answers are LongBench's (arXiv 2308.14508). The published chat format has published prompts,
which end differently.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One benchmark: the prompt of a record, and the length of its answer."""

    prompt: str
    """Text with {field} for each field of the record that it quotes."""
    max_new_tokens: int
    """Longest answer, in tokens."""
    id_field: str = "_id"
    answer_prefix: str = ""
    """The word that ends the prompt. In the published chat format it opens the assistant's answer instead."""
    filtered: bool = True
    """Whether prompts outside the range of lengths are left out."""
    code_prompt: str | None = None
    """The prompt in the published chat format, if it is another one."""

    @property
    def published_prompt(self) -> str:
        """The prompt in the published chat format."""
        return self.code_prompt or self.prompt.removesuffix(self.answer_prefix).rstrip("\n")


# The spaces before line breaks are LongBench's own; prompts must match to the byte.
PUBLISHED_CODE_PROMPT = "Please complete the code given below. \n{context}Now, complete the code given."
TASKS = {
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        answer_prefix="Summary:",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        answer_prefix="Answer:",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        answer_prefix="Summary:",
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, code_prompt=PUBLISHED_CODE_PROMPT
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        code_prompt=PUBLISHED_CODE_PROMPT,
    ),
    "aime24": Task("{problem}", 20000, id_field="id", filtered=False),
}
