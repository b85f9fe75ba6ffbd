"""The commands of ``onepass``, one module each. They print plain text."""
