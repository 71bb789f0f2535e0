"""The engine: rule files, the `when:` language, evaluation. It is fed facts, reads only rule files, prints nothing."""
