"""What a plain eager call goes through."""
