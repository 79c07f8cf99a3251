def cases(): return []
def packed_cases(): return []
